"""Tiles of the owned span of a weight, and the loads and stores of a tile.

The elements of formats without blocks are split into flat runs. Weights with blocks are split into
bands of full block rows around the span, and bands into tiles of complete blocks in both
directions, so that no two programs share a block. A tile whose elements are all owned and whose
rows start at 16-byte boundaries uses loads and stores without masks (`FULL`), which Triton
vectorises. All other tiles go element by element.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from zerocast.backends.descriptor import Column
from zerocast.backends.triton.codec import as_f32, bf16_bits
from zerocast.backends.triton.launch import COLUMNS, MASTER_BASE, NUMEL, START, address
from zerocast.formats import FormatSpec

_WIDEST = 256


@dataclass(frozen=True)
class TileShape:
    """A tile of `height` x `width` elements; `steps` of them, stacked, form a program's band."""

    fmt: FormatSpec
    height: int
    width: int
    steps: int

    @staticmethod
    def for_format(fmt: FormatSpec, elements: int = 4096) -> "TileShape":
        """Return one tile per program; its height divides the height of a block, or is a multiple
        of it.
        """
        assert fmt.block
        own = fmt.columnwise_block or (1, 1)
        height = max(fmt.block[0], own[0], elements // _WIDEST)
        width = max(fmt.block[1], own[1], min(_WIDEST, elements // height))
        height = min(height, elements // width)
        return TileShape(fmt, height, width, 1)

    @staticmethod
    def for_amaxes(fmt: FormatSpec, elements: int = 4096) -> "TileShape":
        """Return as many tiles per program as cover complete blocks."""
        assert fmt.block
        shape = TileShape.for_format(fmt, elements)
        return TileShape(fmt, shape.height, shape.width, max(1, fmt.block[0] // shape.height))

    @property
    def band(self) -> int:
        """The number of rows that a program covers."""
        return self.height * self.steps

    def constants(self) -> dict[str, int]:
        """Return the compile-time arguments of the kernels; an absent columnwise grid has 0
        rows.
        """
        assert self.fmt.block
        own = self.fmt.columnwise_block or (0, 0)
        return {
            "HEIGHT": self.height,
            "STEPS": self.steps,
            "WIDTH_A": self.width,
            "ROWS_A": self.fmt.block[0],
            "COLUMNS_A": self.fmt.block[1],
            "OWN_ROWS": own[0],
            "OWN_COLUMNS": own[1],
        }


@dataclass(frozen=True)
class Flat:
    """Splits the owned span into runs of `size` elements."""

    size: int

    def count(self, row: list[int]) -> int:
        """Return the number of runs of one weight."""
        return -(-row[Column.NUMEL] // self.size)


@dataclass(frozen=True)
class Bands:
    """Splits the bands of `height` rows that hold an owned element into tiles of `width`
    columns.
    """

    height: int
    width: int

    def count(self, row: list[int]) -> int:
        """Return the number of tiles of one weight."""
        if row[Column.NUMEL] == 0:
            return 0
        columns, start = row[Column.COLUMNS], row[Column.START]
        rows = -(-(start + row[Column.NUMEL]) // columns)
        return (-(-rows // self.height) - start // columns // self.height) * -(-columns // self.width)


@triton.jit
def band_tile(row, tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return (first row, first column) of a tile of `Bands`."""
    columns = tl.load(row + COLUMNS)
    tile_columns = (columns + WIDTH - 1) // WIDTH
    band = tl.load(row + START) // columns // HEIGHT + tile // tile_columns
    return band * HEIGHT, tile % tile_columns * WIDTH


@triton.jit
def is_owned(row, first_row, first_column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return True if every element of a rectangle is owned."""
    columns = tl.load(row + COLUMNS)
    start = tl.load(row + START)
    first = first_row * columns + first_column
    last = first + (HEIGHT - 1) * columns + WIDTH
    return (first_column + WIDTH <= columns) & (first >= start) & (last <= start + tl.load(row + NUMEL))


@triton.jit
def owned(row, first_row, first_column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the mask `[HEIGHT, WIDTH]` of the owned elements of a rectangle.

    Each row owns one run, so that only the ends of the runs need 64-bit arithmetic.
    """
    columns = tl.load(row + COLUMNS)
    begin = tl.load(row + START) - (first_row + tl.arange(0, HEIGHT)[:, None]) * columns
    end = tl.minimum(begin + tl.load(row + NUMEL), columns) - first_column
    begin = tl.minimum(tl.maximum(begin - first_column, 0), WIDTH).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), WIDTH).to(tl.int32)
    c = tl.arange(0, WIDTH)[None, :]
    return (c >= begin) & (c < end)


@triton.jit
def offsets(columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr):
    """Return the offsets `[HEIGHT, WIDTH]` of a rectangle's elements from its first.

    The row pitch of a full tile is a multiple of 16, which is passed to the compiler as a hint.
    """
    if FULL:
        columns = columns // 16 * 16
    return tl.arange(0, HEIGHT)[:, None] * columns + tl.arange(0, WIDTH)[None, :]


@triton.jit
def element(bases, row, first, DTYPE: tl.constexpr):
    """Return the address of element `first` of the weight in the master, or in a parallel base."""
    size: tl.constexpr = 4 if DTYPE == tl.float32 else 2
    return address(bases, row, MASTER_BASE, size) + (first - tl.load(row + START)) * size


@triton.jit
def pointer(at, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Return an address as a pointer, with a hint to the compiler that it is a multiple of 16 for a
    full tile.
    """
    p = at.to(tl.pointer_type(DTYPE))
    if FULL:
        p = tl.multiple_of(p, 16)
    return p


@triton.jit
def load_raw(at, i, mask, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Load elements `i` from an address unconverted; 0 where masked."""
    p = pointer(at, DTYPE, FULL)
    if FULL:
        return tl.load(p + i)
    else:
        return tl.load(p + i, mask=mask, other=0)


@triton.jit
def load_f32(at, i, mask, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Load elements `i` from an address, widened to f32; 0 where masked."""
    if DTYPE == tl.bfloat16:
        return as_f32(load_raw(at, i, mask, tl.uint16, FULL).to(tl.int32) << 16)
    else:
        return load_raw(at, i, mask, DTYPE, FULL).to(tl.float32)


@triton.jit
def store_raw(at, i, value, mask, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Store elements `i` at an address unconverted."""
    p = pointer(at, DTYPE, FULL)
    if FULL:
        tl.store(p + i, value)
    else:
        tl.store(p + i, value, mask=mask)


@triton.jit
def store_f32(at, i, value, mask, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Store f32 elements as f32, or rounded to bf16."""
    if DTYPE == tl.bfloat16:
        store_raw(at, i, (bf16_bits(value) >> 16).to(tl.int16), mask, tl.int16, FULL)
    else:
        store_raw(at, i, value, mask, tl.float32, FULL)
