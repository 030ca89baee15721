"""Inputs: the generator of the goldens, and matrices with what real weights rarely hold."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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
