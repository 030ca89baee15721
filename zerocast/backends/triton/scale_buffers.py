"""Scale buffers of blocked formats, split into tiles with their padding (formats/layout.py)."""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from zerocast.backends.descriptor import Column
from zerocast.backends.triton.launch import COLUMNS, ROWS, address
from zerocast.backends.triton.scales import BF16, FP32
from zerocast.formats import Block, FormatSpec, ScaleRule
from zerocast.formats.layout import Buffer, columnwise_scale_inv, rowwise_scale_inv

# The size of a tile, in scales.
HEIGHT = 32
WIDTH = 128


@dataclass(frozen=True)
class ScaleBuffer:
    """One kind of scale buffer: a padded grid of blocks, possibly transposed or with repeated rows
    or columns.
    """

    fmt: FormatSpec
    block: Block
    is_columnwise: bool
    transposed: bool
    rounding: Block  # multiples that the buffer's rows and columns are padded to

    @staticmethod
    def rowwise(fmt: FormatSpec) -> "ScaleBuffer":
        """Return the scale buffer of the rowwise data."""
        assert fmt.block
        rounding = {ScaleRule.FP32: (1, 4), ScaleRule.BF16: (1, 1)}.get(fmt.scale_rule, (128, 4))
        return ScaleBuffer(fmt, fmt.block, False, False, rounding)

    @staticmethod
    def columnwise(fmt: FormatSpec) -> "ScaleBuffer":
        """Return the scale buffer of columnwise codes that are not transposed."""
        block = fmt.columnwise_block or fmt.block
        assert block
        return ScaleBuffer(fmt, block, True, False, (4, 128))

    @staticmethod
    def transpose(fmt: FormatSpec) -> "ScaleBuffer":
        """Return the scale buffer of columnwise data that is the transposed rowwise data."""
        rowwise = ScaleBuffer.rowwise(fmt)
        return ScaleBuffer(fmt, rowwise.block, True, True, rowwise.rounding)

    def shape(self, rows: int, columns: int) -> Buffer:
        """Return the shape and dtype of the buffer of a weight."""
        buffer = (columnwise_scale_inv if self.is_columnwise else rowwise_scale_inv)(self.fmt, rows, columns)
        assert buffer and len(buffer.shape) == 2
        return buffer

    def count(self, row: list[int]) -> int:
        """Return the number of tiles of one weight's buffer."""
        block_rows, block_columns = self.shape(row[Column.ROWS], row[Column.COLUMNS]).shape
        return -(-block_rows // HEIGHT) * -(-block_columns // WIDTH)

    def constants(self) -> dict[str, Any]:
        """Return the compile-time arguments of the kernels."""
        return {
            "TRANSPOSED": self.transposed,
            "ROWS_A": self.block[0],
            "COLUMNS_A": self.block[1],
            "REPEAT": self.fmt.scale_repeat(self.is_columnwise)[0],
            "REPEAT_COLUMNS": self.fmt.scale_repeat(self.is_columnwise)[1],
            "ROUND_ROWS": self.rounding[0],
            "ROUND_COLUMNS": self.rounding[1],
            "HEIGHT": HEIGHT,
            "WIDTH_A": WIDTH,
        }


@triton.jit
def buffer_tile(
    row,
    tile,
    TRANSPOSED: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    REPEAT: tl.constexpr,
    REPEAT_COLUMNS: tl.constexpr,
    ROUND_ROWS: tl.constexpr,
    ROUND_COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
):
    """Return a tile of the buffer: (row and column of the grid, offset, mask of the buffer, mask of
    the grid within it).
    """
    block_rows = (tl.load(row + ROWS) + ROWS_A - 1) // ROWS_A
    block_columns = (tl.load(row + COLUMNS) + COLUMNS_A - 1) // COLUMNS_A
    if TRANSPOSED:
        block_rows, block_columns = block_columns, block_rows
    height = (block_rows * REPEAT + ROUND_ROWS - 1) // ROUND_ROWS * ROUND_ROWS
    width = (block_columns * REPEAT_COLUMNS + ROUND_COLUMNS - 1) // ROUND_COLUMNS * ROUND_COLUMNS
    tiles_across = (width + WIDTH_A - 1) // WIDTH_A
    i = tile // tiles_across * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    j = tile % tiles_across * WIDTH_A + tl.arange(0, WIDTH_A)[None, :]
    at, in_buffer = i * width + j, (i < height) & (j < width)
    i, j = i // REPEAT, j // REPEAT_COLUMNS
    return i, j, at, in_buffer, (i < block_rows) & (j < block_columns)


@triton.jit
def store_scales(bases, row, BASE: tl.constexpr, at, scale, in_buffer, in_grid, RULE: tl.constexpr):
    """Store a tile of scales: f32 with padding 1, bf16 without padding, or bytes with padding 0."""
    if RULE == BF16:
        out = address(bases, row, BASE, 2).to(tl.pointer_type(tl.int16))
        tl.store(out + at, scale.to(tl.int16), mask=in_buffer)
    elif RULE == FP32:
        out = address(bases, row, BASE, 4).to(tl.pointer_type(tl.float32))
        tl.store(out + at, tl.where(in_grid, scale, 1.0), mask=in_buffer)
    else:
        out = address(bases, row, BASE, 1).to(tl.pointer_type(tl.uint8))
        tl.store(out + at, tl.where(in_grid, scale, 0).to(tl.uint8), mask=in_buffer)
