"""Matrices of values that real weights hold and rarely hold, casts of them in this process, and the bytes that come out; and
sharded casts as values, with what every rank does with them: the cases that the tests send to the pool.
"""

import dataclasses
import functools
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import zerocast
from tests import devices
from zerocast import CastPlan, QuantizedWeight, backends, get_format
from zerocast.backends import ops, reference
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import Columnwise
from zerocast.formats.layout import BUFFERS, Span, byte_range, matrix_shape, stored_matrices

F32 = NDArray[np.float32]

TINY = np.array([[0.1, -0.5, 3, -6], [0, 1 / 3, 5.984375, -0.015625]], np.float32)
TINY_SUBNORMAL = 1e-41


def lcg_matrix(rows: int, columns: int, seed: int) -> F32:
    """Return deterministic f32 values whose magnitude depends on the row, exact in any language."""
    n = np.arange(rows * columns, dtype=np.uint64) + np.uint64(7919 * seed)
    u = (n * np.uint64(2654435761) + np.uint64(1013904223)) & np.uint64(0xFFFFFFFF)
    u ^= u >> np.uint64(15)
    u = (u * np.uint64(2246822519)) & np.uint64(0xFFFFFFFF)
    u ^= u >> np.uint64(13)
    value = (u >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
    scale = np.float32(2.0) ** (np.arange(rows) % 7 - 3).astype(np.float32)
    return value.reshape(rows, columns) * scale[:, None]


def bit_patterns(count: int, seed: int) -> F32:
    """Return f32 values drawn by bit pattern: every exponent as likely as any other, Inf, NaN and subnormals included."""
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


def _normal(rows: int, columns: int, seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)


def _wide(rows: int, columns: int, seed: int) -> F32:
    exponent = np.random.default_rng(seed + 1).uniform(-6, 2, (rows, columns))
    return _normal(rows, columns, seed) * (10.0**exponent).astype(np.float32)


def _patched(value: float, share: float) -> Callable[[int, int, int], F32]:
    def make(rows: int, columns: int, seed: int) -> F32:
        x = _normal(rows, columns, seed)
        x[np.random.default_rng(seed + 1).random((rows, columns)) < share] = value
        return x

    return make


def _zero_blocks(rows: int, columns: int, seed: int) -> F32:
    x = _normal(rows, columns, seed)
    x[: rows // 2, : columns // 2] = 0.0
    x[rows // 2 :, columns // 2 :] = -0.0
    return x


def _bits(rows: int, columns: int, seed: int) -> F32:
    return bit_patterns(rows * columns, seed).reshape(rows, columns)


def _finite_bits(rows: int, columns: int, seed: int) -> F32:
    x = _bits(rows, columns, seed)
    return np.where(np.isfinite(x), x, np.float32(1.0))


CONTENTS: dict[str, Callable[[int, int, int], F32]] = {
    "lcg": lcg_matrix,
    "normal": _normal,
    "wide": _wide,
    "zero": lambda rows, columns, seed: np.zeros((rows, columns), np.float32),
    "zero_blocks": _zero_blocks,
    "some_zero": lambda rows, columns, seed: _normal(rows, columns, seed) * np.float32(seed % 3),
    "subnormal": lambda rows, columns, seed: _normal(rows, columns, seed) * np.float32(TINY_SUBNORMAL),
    "nan": _patched(np.nan, 0.05),
    "all_nan": _patched(np.nan, 2.0),
    "inf": _patched(np.inf, 0.02),
    "minus_inf": _patched(-np.inf, 0.02),
    "bits": _bits,
    "finite_bits": _finite_bits,
}


def matrix(content: str, rows: int, columns: int, seed: int) -> F32:
    """Return `rows x columns` of the content that the name in `CONTENTS` says."""
    return CONTENTS[content](rows, columns, seed)


FORMATS = (
    "fp8_delayed:amax_history_len=4",
    "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=3,element=e5m2,margin=2",
    "fp8_current",
    "fp8_current:amax_epsilon=0.25,element=e5m2,power_of_2_scale=True",
    "fp8_block",
    "fp8_block:amax_epsilon=2.0,element=e5m2,power_of_2_scale=False",
    "fp8_block:power_of_2_scale=False",
    "mxfp8",
    "mxfp8:block=32x32",
    "mxfp4",
    "mxfp4:exact_in_fp8=False,scale_rounding=floor",
    "nvfp4",
    "nvfp4:exact_in_fp8=True",
    "int4",
    "identity",
)
NOMINAL = (torch.bfloat16, torch.float16, torch.float32)
CAST_BUFFERS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax")

Bytes = dict[str, NDArray[np.uint8]]


def raw(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor on any device, flat."""
    array: NDArray[np.uint8] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return array


def sha(data: Any) -> str:
    """Return the first 16 digits of the sha256 of raw bytes, as in goldens.json."""
    if isinstance(data, Tensor):
        data = raw(data)
    return hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()[:16]


def example(
    fmt: str = "nvfp4", shape: tuple[int, ...] = (32, 64), nominal: torch.dtype = torch.bfloat16, seed: int = 0
) -> QuantizedWeight:
    """Return the cast of one or several matrices that are the same everywhere."""
    matrix = torch.from_numpy(lcg_matrix(math.prod(shape[:-1]), shape[-1], seed))
    return cast_whole(fmt, matrix.view(shape), nominal)


def bytes_of(weight: QuantizedWeight) -> Bytes:
    """Return copies of the bytes of every buffer, and of the columnwise copy that a product would make."""
    held = {name: getattr(weight, name) for name in BUFFERS}
    if weight.state.columnwise_on_demand and weight.format.columnwise is Columnwise.TRANSPOSE:
        assert held["columnwise_data"] is None
        matrices = weight.matrices()
        made = [
            ops.transposed(
                backends.choose(weight.device),
                str(weight.format),
                matrix.rowwise_data,
                matrix.rowwise_scale_inv,
                *matrix.matrix_shape,
            )
            for matrix in matrices
        ]
        scales = torch.cat([scale for _, scale in made]) if weight.format.block else weight.rowwise_scale_inv
        held["columnwise_data"], held["columnwise_scale_inv"] = torch.cat([codes for codes, _ in made]), scales
    return {name: raw(tensor).copy() for name, tensor in held.items() if tensor is not None}


def unsharded(fmt: str, master: Tensor, nominal: torch.dtype, scale: float = 1.0) -> Bytes:
    """Return the bytes that a cast must leave, computed without a plan, shard or descriptor."""
    return dict(_unsharded(fmt, raw(master).tobytes(), master.dtype, tuple(master.shape), nominal, scale))


# Runs that differ in what must change no bit cast the same values again and again.
@functools.lru_cache(1024)
def _unsharded(
    fmt: str, master_bytes: bytes, dtype: torch.dtype, shape: tuple[int, ...], nominal: torch.dtype, scale: float
) -> Bytes:
    master = torch.from_numpy(np.frombuffer(master_bytes, np.uint8).copy()).view(dtype).view(shape)
    quantized = reference.quantize(zerocast.get_format(fmt), master, nominal, torch.tensor([scale]))
    held = {name: getattr(quantized, name) for name in CAST_BUFFERS}
    found = {name: raw(tensor) for name, tensor in held.items() if tensor is not None}
    for array in found.values():
        array.flags.writeable = False
    return found


def cast_whole(
    fmt: str, master: Tensor, nominal: torch.dtype = torch.bfloat16, backend: str | None = None, scale: float = 1.0
) -> QuantizedWeight:
    """Cast a weight from its whole master on the backend's device, columnwise copies included."""
    device = devices.of(backend)
    weight = QuantizedWeight.empty(master.shape, fmt, nominal, device)
    if weight.scale is not None:
        weight.scale.fill_(scale)
    plan = zerocast.CastPlan([weight], [master.reshape(-1).to(device)], [0], ONE_PROCESS, backend=backend)
    plan.cast()
    plan.post_all_gather()
    return weight.to("cpu")


def assert_same_bytes(found: Mapping[str, Any], expected: Mapping[str, Any], what: str = "") -> None:
    """Compare every buffer of `expected` to the byte. The message names the first difference."""
    for name, wanted in expected.items():
        assert name in found, f"{what}: no {name}"
        a, b = np.asarray(found[name]).reshape(-1), np.asarray(wanted).reshape(-1)
        assert a.shape == b.shape, f"{what}: {name} has {a.size} bytes, {b.size} expected"
        (wrong,) = np.nonzero(a != b)
        if wrong.size:
            at = wrong[0]
            pytest.fail(
                f"{what}: {name} differs in {wrong.size} of {a.size} bytes; at {at} {a[at]:#04x}, not {b[at]:#04x}"
            )


POISON = 0xA5  # both nibbles differ, and differ from what they become when swapped
Cut = tuple[int, int]


@dataclass(frozen=True)
class Weight:
    """One weight of a sharded cast: `spans[rank]` is the (start, stop) that the rank owns."""

    fmt: str
    shape: tuple[int, ...]
    spans: tuple[Cut, ...]
    nominal: torch.dtype = torch.bfloat16
    content: str = "lcg"
    seed: int = 0
    nominal_master: bool = False

    def master(self, step: int = 0) -> Tensor:
        """Return the whole master of logical shape at a step, in FP32 or the nominal dtype."""
        x = torch.from_numpy(matrix(self.content, *matrix_shape(self.shape), self.seed + step)).view(self.shape)
        return x.to(self.nominal) if self.nominal_master else x

    def shard(self, rank: int, step: int = 0) -> tuple[Tensor | None, int | None]:
        """Return (master, start) of a rank, or None for both if it owns nothing."""
        start, stop = self.spans[rank]
        if start == stop:
            return None, None
        return self.master(step).view(-1)[start:stop].clone(), start

    def owned(self) -> NDArray[np.bool_]:
        """Return a flat mask of the elements that any rank owns."""
        mask = np.zeros(math.prod(self.shape), bool)
        for start, stop in self.spans:
            mask[start:stop] = True
        return mask

    def empty(self, device: str = "cpu") -> QuantizedWeight:
        """Return the weight on a rank, its data full of poison."""
        weight = QuantizedWeight.empty(self.shape, self.fmt, self.nominal, device)
        for data in (weight.rowwise_data, weight.columnwise_data):
            if data is not None:
                data.view(torch.uint8).fill_(POISON)
        return weight


def every_format(world: int, seed: int, formats: Sequence[str] = FORMATS) -> tuple[Weight, ...]:
    """Return a weight of every format and nominal dtype, cut after odd elements, with the parts on ranks in any order."""
    draw, cases = random.Random(seed), []
    for fmt in formats:
        for nominal in NOMINAL:
            row, column = get_format(fmt).multiple
            shape = 147 // row * row, 77 // column * column
            numel = shape[0] * shape[1]
            inner = sorted(2 * draw.randrange(numel // 2) + 1 for _ in range(world - 1))
            spans = list(zip([0, *inner], [*inner, numel], strict=True))
            draw.shuffle(spans)
            cases.append(Weight(fmt, shape, tuple(spans), nominal, seed=draw.randrange(1000)))
    return tuple(cases)


def expected_of_shards(weight: Weight, scale: float = 1.0, step: int = 0) -> Bytes:
    """Return the unsharded cast. Gaps count as zeros for the amaxes and are poison in the data; an unowned
    weight keeps all it had.
    """
    mask = weight.owned()
    master = torch.where(torch.from_numpy(mask), weight.master(step).view(-1), 0.0).view(weight.shape)
    buffers = unsharded(weight.fmt, master, weight.nominal, scale)
    if not mask.any():
        initial = bytes_of(weight.empty())
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax"):
            if name in buffers:
                padding = initial.get(name, initial["rowwise_scale_inv"])
                buffers[name] = np.resize(padding, buffers[name].shape)
    count, matrix = stored_matrices(get_format(weight.fmt), weight.shape)
    return _with_poison(weight, buffers, mask.reshape(count, *matrix))


def _with_poison(weight: Weight, buffers: Bytes, owned: NDArray[np.bool_]) -> Bytes:
    """Return the buffers with poison outside of `owned`, `[number, rows, columns]` of the stored matrices."""
    spec = get_format(weight.fmt)
    for name in ("rowwise_data", "columnwise_data"):
        if name not in buffers or owned.all():
            continue
        transposed = name == "columnwise_data" and spec.columnwise is Columnwise.TRANSPOSE
        mask = owned.swapaxes(1, 2) if transposed else owned
        if spec.bits == 4:
            buffers[name] = _blend_nibbles(buffers[name], mask, transposed)
        else:
            mask_of_bytes = np.repeat(mask.reshape(-1), len(buffers[name]) // mask.size)
            buffers[name] = np.where(mask_of_bytes, buffers[name], POISON).astype(np.uint8)
    return buffers


def _blend_nibbles(data: NDArray[np.uint8], owned: NDArray[np.bool_], transposed: bool) -> NDArray[np.uint8]:
    """Poison where nothing is owned; the poison's nibble goes by the element's column in the rowwise data."""
    column = np.indices(owned.shape)[1 if transposed else 2].reshape(-1)
    poison = np.where(column % 2, POISON >> 4, POISON & 15)
    codes = np.stack((data & 15, data >> 4), -1).reshape(-1)
    codes = np.where(owned.reshape(-1), codes, poison)
    return (codes[0::2] | (codes[1::2] << 4)).astype(np.uint8)


class Gathered:
    """Casts of cases on a rank, whose bytes the test gathers in the place of a host. Subclasses name the buffers that travel."""

    cases: tuple[Weight, ...]
    rank: int
    complaints: list[str]

    def payloads(self, index: int) -> list[Tensor]:
        """Return the buffers of codes that a gather sends."""
        raise NotImplementedError

    def owned_bytes(self, index: int) -> tuple[int, int]:
        """Return the bytes of rowwise data that this rank writes."""
        case = self.cases[index]
        return byte_range(get_format(case.fmt), case.shape, Span(*case.spans[self.rank]), case.nominal)

    def check_others_untouched(self) -> None:
        """Complain of bytes that were written and are not owned."""
        for index, case in enumerate(self.cases):
            first, last = self.owned_bytes(index)
            for data in self.payloads(index):
                rest = np.delete(raw(data), slice(first, last))
                if (rest != POISON).any():
                    self.complaints.append(f"weight {index} ({case}) was written outside [{first}, {last})")

    def gather(self, group: dist.ProcessGroup | None = None) -> None:
        """Gather every owner's bytes on every rank, and complain of owners that disagree on a byte that they share."""
        mine = []
        for index in range(len(self.cases)):
            first, last = self.owned_bytes(index)
            mine.append([(first, raw(data)[first:last].copy()) for data in self.payloads(index)])
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        for index in range(len(self.cases)):
            for direction, data in enumerate(self.payloads(index)):
                flat, seen = raw(data), np.zeros(data.nbytes, bool)
                for first, part in (theirs[index][direction] for theirs in everyone):
                    where = slice(first, first + part.size)
                    twice = seen[where]
                    if (flat[where][twice] != part[twice]).any():
                        self.complaints.append(f"two owners of weight {index} disagree on a byte from {first} on")
                    flat[where], seen[where] = part, True
                data.view(torch.uint8).view(-1).copy_(torch.from_numpy(flat))  # on a GPU `flat` is a copy


@dataclass
class Sharded(Gathered):
    """The weights of a case as this rank holds them."""

    cases: tuple[Weight, ...]
    rank: int
    device: str = "cpu"
    weights: list[QuantizedWeight] = dataclasses.field(init=False)
    masters: list[Tensor | None] = dataclasses.field(init=False)
    starts: list[int | None] = dataclasses.field(init=False)
    complaints: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = [case.empty(self.device) for case in self.cases]
        shards = [case.shard(self.rank) for case in self.cases]
        self.masters = [None if master is None else master.to(self.device) for master, _ in shards]
        self.starts = [start for _, start in shards]

    def set_masters(self, step: int) -> None:
        """Set the masters of another step, in place."""
        for case, master in zip(self.cases, self.masters, strict=True):
            part, _ = case.shard(self.rank, step)
            if master is not None and part is not None:
                master.copy_(part)

    def payloads(self, index: int) -> list[Tensor]:
        """Return the rowwise data, and the columnwise data unless it derives from it."""
        weight = self.weights[index]
        own = weight.format.columnwise is Columnwise.OWN_GRID
        column = weight.columnwise_data
        return [weight.rowwise_data, column] if own and column is not None else [weight.rowwise_data]


@dataclass(frozen=True)
class Outcome:
    """The bytes that a rank holds after each step, by weight, and its complaints on the way.

    A rank that raises costs the pool its processes; a complaint costs nothing, so that hypothesis can shrink.
    """

    steps: list[list[Bytes]]
    complaints: list[str]


def cast_and_gather(
    cases: tuple[Weight, ...], backend: str | None = None, steps: int = 1, device: str = "cpu"
) -> Outcome:
    """Cast through one plan, gather, transpose; the bytes of all weights after each step."""
    sharded = Sharded(cases, dist.get_rank(), device)
    plan = CastPlan(sharded.weights, sharded.masters, sharded.starts, backend=backend)
    outcome = Outcome([], sharded.complaints)
    for step in range(steps):
        sharded.set_masters(step)
        plan.forget_call()  # the masters are others, and some contents are not finite
        plan.cast()
        if step == 0:
            sharded.check_others_untouched()
        sharded.gather()
        plan.post_all_gather()
        outcome.steps.append([bytes_of(weight) for weight in sharded.weights])
    return outcome


def assert_unsharded(outcome: Outcome, cases: tuple[Weight, ...], what: str, step: int = 0) -> None:
    """Check what a rank holds after its last step against the unsharded cast of the masters of `step`."""
    assert not outcome.complaints, what
    for case, found in zip(cases, outcome.steps[-1], strict=True):
        assert_same_bytes(found, expected_of_shards(case, step=step), f"{what}, {case}")
