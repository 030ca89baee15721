"""Amaxes inside a kernel: reduced to blocks, loaded from and stored to the packed buffer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.codec import INF, as_f32, bf16_bits, magnitude
from zerocast.backends.triton.launch import COLUMNS, NOT_FINITE, ROWS


def as_integers(packed: Tensor) -> Tensor:
    """Return the packed buffer as int16 or int32: amaxes are not negative, so bits and values have
    the same order.
    """
    return packed.view(torch.int16 if packed.dtype is torch.bfloat16 else torch.int32)


@triton.jit
def amax_bits(x):
    """Return the bits of |x| as int32, 0 for a NaN."""
    m = magnitude(x)
    return tl.where(m > INF, 0, m)


@triton.jit
def note_not_finite(packed, row, bits):
    """Set the NOT_FINITE number of a weight to 1 if `bits` is NaN or Inf, and the table has such a
    number. `bits` is the largest |x| of some elements, NaN above Inf. Several programs may write
    the same 1.
    """
    i = tl.load(row + NOT_FINITE)
    word = amax_word(packed, tl.full((), 0x3F800000, tl.int32))
    tl.store(packed + i, word, mask=(bits >= INF) & (i >= 0))


@triton.jit
def block_max(m, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS_A: tl.constexpr, COLUMNS_A: tl.constexpr):
    """Return the largest of each ROWS_A x COLUMNS_A block of `m [HEIGHT, WIDTH]`."""
    m = tl.reshape(m, (HEIGHT // ROWS_A, ROWS_A, WIDTH // COLUMNS_A, COLUMNS_A))
    return tl.max(tl.max(m, 3), 1)


@triton.jit
def amax_word(packed, bits):
    """Return the bits of an f32 amax in the dtype of the packed buffer."""
    if packed.dtype.element_ty == tl.int16:
        return (bf16_bits(as_f32(bits)) >> 16).to(tl.int16)
    else:
        return bits


@triton.jit
def load_amax(packed, i, mask):
    """Return the amaxes `i` of the packed buffer as f32; 0 where masked."""
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
    """Return (index in the weight's grid, mask of the blocks that exist) of the DOWN x ACROSS
    blocks of a tile.
    """
    block_columns = (tl.load(row + COLUMNS) + COLUMNS_A - 1) // COLUMNS_A
    i = first_row // ROWS_A + tl.arange(0, DOWN)[:, None]
    j = first_column // COLUMNS_A + tl.arange(0, ACROSS)[None, :]
    return i * block_columns + j, (i * ROWS_A < tl.load(row + ROWS)) & (j < block_columns)


@triton.jit
def group_amaxes(
    packed,
    row,
    PLACE: tl.constexpr,
    first_row,
    first_column,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    ACROSS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
):
    """Return the largest amax `[1, ACROSS]` of the scale group of each block of a tile in one row
    of groups.
    """
    top = first_row // (GROUP_ROWS * ROWS_A) * (GROUP_ROWS * ROWS_A)
    cell, exists = grid_cells(row, top, first_column, ROWS_A, COLUMNS_A, GROUP_ROWS, ACROSS)
    amax = load_amax(packed, tl.load(row + PLACE) + cell, exists)
    groups = tl.max(tl.max(tl.reshape(amax, (GROUP_ROWS, ACROSS // GROUP_COLUMNS, GROUP_COLUMNS)), 2), 0)
    return tl.reshape(tl.broadcast_to(groups[:, None], (ACROSS // GROUP_COLUMNS, GROUP_COLUMNS)), (1, ACROSS))


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
    """Store amaxes of complete blocks `[DOWN, ACROSS]`. No other program shares them, so no atomics
    are needed.
    """
    cell, exists = grid_cells(row, first_row, first_column, ROWS_A, COLUMNS_A, DOWN, ACROSS)
    tl.store(packed + tl.load(row + PLACE) + cell, amax_word(packed, bits), mask=exists)


@triton.jit
def max_into(packed, i, bits):
    """Set `packed[i] = max(packed[i], bits)` for one amax that many programs share.

    There is no 16-bit atomic maximum, so a bf16 buffer uses compare-and-swap on the 32-bit word
    around the amax. The word of the last amax, if their number is odd, includes two bytes behind
    the buffer. They are written back unchanged, and allocators round sizes up, so they exist. Both
    variants read first, so that only a new maximum costs an atomic.
    """
    word = amax_word(packed, bits)
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
        previous = tl.atomic_cas(around, seen, (seen & others) | (half << shift), sem="relaxed")
        pending = (previous != seen) & (((previous >> shift) & 0xFFFF) < half)
        seen = previous
