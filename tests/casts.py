"""Matrices of values that real weights hold and rarely hold, casts of them in this process, and the bytes that come out."""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import zerocast
from tests import devices
from zerocast import QuantizedWeight, backends
from zerocast.backends import ops, reference
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import Columnwise
from zerocast.formats.layout import BUFFERS

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
