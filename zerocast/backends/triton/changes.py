"""Which bytes of a weight's rowwise data become others, noted in a bitmap beside their store."""

import triton
import triton.language as tl

from zerocast.backends.triton.launch import CHANGED
from zerocast.backends.triton.tiles import load_raw, store_raw


@triton.jit
def change_bit(row, byte):
    """The bit of a byte of the weight."""
    return tl.load(row + CHANGED) + byte


@triton.jit
def store_noted(
    out,
    i,
    data,
    mask,
    changed,
    bit,
    pitch,
    HEIGHT: tl.constexpr,
    WIDTH_B: tl.constexpr,
    FULL: tl.constexpr,
    NOTES: tl.constexpr,
):
    """Store a tile of bytes `[HEIGHT, WIDTH_B]`, or a run of WIDTH_B, whose rows lie `pitch` apart
    and whose first byte has the bit `bit`.
    """
    if NOTES:
        differs = load_raw(out, i, mask, tl.uint8, FULL) != data
        if not FULL:
            differs = differs & mask
        packs: tl.constexpr = FULL and WIDTH_B % 32 == 0
        if packs:
            if (bit % 32 == 0) & (pitch % 32 == 0):
                _set_words(changed, differs, bit, pitch, HEIGHT, WIDTH_B)
            else:
                set_bits(changed, bit + i, differs)
        else:
            set_bits(changed, bit + i, differs)
    store_raw(out, i, data, mask, tl.uint8, FULL)


@triton.jit
def set_bits(changed, bits, differs):
    """Set bits one by one. Programs share words of the bitmap."""
    tl.atomic_or(changed + bits // 32, (1 << (bits % 32)).to(tl.int32), mask=differs, sem="relaxed")


@triton.jit
def _set_words(changed, differs, bit, pitch, HEIGHT: tl.constexpr, WIDTH_B: tl.constexpr):
    of_words = tl.reshape(differs.to(tl.int32), (HEIGHT, WIDTH_B // 32, 32))
    words = tl.sum(of_words << tl.arange(0, 32)[None, None, :], 2).to(tl.int32)
    at = (bit + tl.arange(0, HEIGHT)[:, None] * pitch) // 32 + tl.arange(0, WIDTH_B // 32)[None, :]
    tl.atomic_or(changed + at, words, mask=words != 0, sem="relaxed")
