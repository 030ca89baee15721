"""Amaxes inside a kernel: from elements to blocks, and to and from the packed buffer of bf16 or f32, passed as integers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.codec import INF, as_f32, bf16_bits, magnitude
from zerocast.backends.triton.launch import COLUMNS, ROWS


def as_integers(packed: Tensor) -> Tensor:
    """The packed buffer as int16 or int32: what it holds is not negative, so its bits order as its values do."""
    return packed.view(torch.int16 if packed.dtype is torch.bfloat16 else torch.int32)


@triton.jit
def amax_bits(x):
    """Bits of |x| as int32, 0 for a NaN."""
    m = magnitude(x)
    return tl.where(m > INF, 0, m)


@triton.jit
def block_max(m, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS_A: tl.constexpr, COLUMNS_A: tl.constexpr):
    """The largest of each ROWS_A x COLUMNS_A block of `m [HEIGHT, WIDTH]`."""
    m = tl.reshape(m, (HEIGHT // ROWS_A, ROWS_A, WIDTH // COLUMNS_A, COLUMNS_A))
    return tl.max(tl.max(m, 3), 1)


@triton.jit
def _word(packed, bits):
    """The bits of an f32 amax as the packed buffer holds it."""
    if packed.dtype.element_ty == tl.int16:
        return (bf16_bits(as_f32(bits)) >> 16).to(tl.int16)
    else:
        return bits


@triton.jit
def load_amax(packed, i, mask):
    """Amaxes `i` of the packed buffer as f32; 0 where masked."""
    bits = tl.load(packed + i, mask=mask, other=0).to(tl.int32)
    if packed.dtype.element_ty == tl.int16:
        bits = bits << 16
    return as_f32(bits)


@triton.jit
def grid_cells(
    row,
    first_row,
    first_column,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """(index within a weight's grid of ROWS_A x COLUMNS_A blocks, whether it exists) of the DOWN x ACROSS blocks of a tile."""
    across = (tl.load(row + COLUMNS) + COLUMNS_A - 1) // COLUMNS_A
    i = first_row // ROWS_A + tl.arange(0, DOWN)[:, None]
    j = first_column // COLUMNS_A + tl.arange(0, ACROSS)[None, :]
    return i * across + j, (i * ROWS_A < tl.load(row + ROWS)) & (j < across)


@triton.jit
def store_blocks(
    packed,
    row,
    PLACE: tl.constexpr,
    bits,
    first_row,
    first_column,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Store amaxes of whole blocks `[DOWN, ACROSS]`: no other program has a part of them, so plain stores do, in 16 bits too."""
    cell, exists = grid_cells(row, first_row, first_column, ROWS_A, COLUMNS_A, DOWN, ACROSS)
    tl.store(packed + tl.load(row + PLACE) + cell, _word(packed, bits), mask=exists)


@triton.jit
def max_into(packed, i, bits):
    """`packed[i] = max(packed[i], bits)` for one amax that many programs share.

    There is no atomic maximum on 16 bits: that of a bf16 buffer swaps the 32-bit word around it until nobody came in between. Both
    ways look first, so that only a new maximum costs an atomic.
    """
    word = _word(packed, bits)
    if word > tl.load(packed + i):
        if packed.dtype.element_ty == tl.int16:
            _max_into_half(packed + i, word.to(tl.int32))
        else:
            tl.atomic_max(packed + i, word, sem="relaxed")


@triton.jit
def _max_into_half(at, half):
    address = at.to(tl.int64)
    around = (address // 4 * 4).to(tl.pointer_type(tl.int32))
    shift = ((address % 4) * 8).to(tl.int32)
    others = ~(tl.full((), 0xFFFF, tl.int32) << shift)
    seen = tl.load(around)
    pending = ((seen >> shift) & 0xFFFF) < half
    while pending:
        found = tl.atomic_cas(around, seen, (seen & others) | (half << shift), sem="relaxed")
        pending = (found != seen) & (((found >> shift) & 0xFFFF) < half)
        seen = found
