"""Sharded casts as values, and what every rank does with them: the cases that the tests send to the pool."""

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tests import casts
from tests.casts import matrix
from zerocast import CastPlan, QuantizedWeight, get_format
from zerocast.formats import Columnwise
from zerocast.formats.layout import Span, byte_range, matrix_shape, stored_matrices

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


def every_format(world: int, seed: int, formats: Sequence[str] = casts.FORMATS) -> tuple[Weight, ...]:
    """Return a weight of every format and nominal dtype, cut after odd elements, with the parts on ranks in any order."""
    draw, cases = random.Random(seed), []
    for fmt in formats:
        for nominal in casts.NOMINAL:
            row, column = get_format(fmt).multiple
            shape = 147 // row * row, 77 // column * column
            numel = shape[0] * shape[1]
            inner = sorted(2 * draw.randrange(numel // 2) + 1 for _ in range(world - 1))
            spans = list(zip([0, *inner], [*inner, numel], strict=True))
            draw.shuffle(spans)
            cases.append(Weight(fmt, shape, tuple(spans), nominal, seed=draw.randrange(1000)))
    return tuple(cases)


def expected(weight: Weight, scale: float = 1.0, step: int = 0) -> casts.Bytes:
    """Return the unsharded cast. Gaps count as zeros for the amaxes and are poison in the data; an unowned
    weight keeps all it had.
    """
    mask = weight.owned()
    master = torch.where(torch.from_numpy(mask), weight.master(step).view(-1), 0.0).view(weight.shape)
    buffers = casts.unsharded(weight.fmt, master, weight.nominal, scale)
    if not mask.any():
        initial = casts.bytes_of(weight.empty())
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax"):
            if name in buffers:
                padding = initial.get(name, initial["rowwise_scale_inv"])
                buffers[name] = np.resize(padding, buffers[name].shape)
    count, matrix = stored_matrices(get_format(weight.fmt), weight.shape)
    return _with_poison(weight, buffers, mask.reshape(count, *matrix))


def _with_poison(weight: Weight, buffers: casts.Bytes, owned: NDArray[np.bool_]) -> casts.Bytes:
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
                rest = np.delete(casts.raw(data), slice(first, last))
                if (rest != POISON).any():
                    self.complaints.append(f"weight {index} ({case}) was written outside [{first}, {last})")

    def gather(self, group: dist.ProcessGroup | None = None) -> None:
        """Gather every owner's bytes on every rank, and complain of owners that disagree on a byte that they share."""
        mine = []
        for index in range(len(self.cases)):
            first, last = self.owned_bytes(index)
            mine.append([(first, casts.raw(data)[first:last].copy()) for data in self.payloads(index)])
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        for index in range(len(self.cases)):
            for direction, data in enumerate(self.payloads(index)):
                flat, seen = casts.raw(data), np.zeros(data.nbytes, bool)
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

    steps: list[list[casts.Bytes]]
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
        outcome.steps.append([casts.bytes_of(weight) for weight in sharded.weights])
    return outcome


def assert_unsharded(outcome: Outcome, cases: tuple[Weight, ...], what: str, step: int = 0) -> None:
    """Check what a rank holds after its last step against the unsharded cast of the masters of `step`."""
    assert not outcome.complaints, what
    for case, found in zip(cases, outcome.steps[-1], strict=True):
        casts.assert_same_bytes(found, expected(case, step=step), f"{what}, {case}")
