"""Stage transpose: columnwise copies, one launch for the data and one for the scales."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.triton.launch import (
    COLUMN_DATA,
    COLUMN_SCALE,
    COLUMNS,
    ROW_DATA,
    ROW_SCALE,
    ROWS,
    WIDTH,
    address,
    addresses,
    find,
    launch,
    tiling,
)
from zerocast.backends.triton.scale_buffers import ScaleBuffer, buffer_tile, store_scales
from zerocast.backends.triton.scales import FP32
from zerocast.backends.triton.tiles import load_raw, offsets, store_raw
from zerocast.formats import FormatSpec

SIDE = 64  # bytes along a square tile; with two codes per byte it has twice the rows


@dataclass(frozen=True)
class Squares:
    """Splits the weight into tiles of `height` x `width` elements."""

    height: int
    width: int

    def count(self, row: list[int]) -> int:
        """Return the number of tiles of one weight."""
        return -(-row[Column.ROWS] // self.height) * -(-row[Column.COLUMNS] // self.width)


def transpose(
    fmt: FormatSpec,
    table: Tensor,
    row_data: list[Tensor],
    row_scales: list[Tensor],
    column_data: list[Tensor],
    column_scales: list[Tensor],
) -> None:
    """Write the columnwise data and scales from the gathered rowwise bytes."""
    device, packing = table.device, fmt.elements_per_byte
    squares = Squares(SIDE * packing, SIDE * packing)
    tiles = tiling(table, squares)
    bases = addresses(row_data, device), addresses(column_data, device)
    head = table, tiles.firsts, tiles.rows, *bases
    launch(
        _data,
        tiles.total,
        device,
        *head,
        HEIGHT=squares.height,
        WIDTH_A=squares.width,
        PACKED=packing == 2,
        num_warps=4 * packing,
    )
    if fmt.block is not None:
        buffer = ScaleBuffer.transpose(fmt)
        tiles = tiling(table, buffer)
        bases = addresses(row_scales, device), addresses(column_scales, device)
        head = table, tiles.firsts, tiles.rows, *bases
        launch(_scales, tiles.total, device, *head, **buffer.constants(), RULE=int(fmt.scale_rule), num_warps=8)


@triton.jit(do_not_specialize=["n"])
def _data(
    table,
    firsts,
    n,
    row_data,
    column_data,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    PACKED: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    tile -= tl.load(firsts + weight)
    rows = tl.load(row + ROWS)
    columns = tl.load(row + COLUMNS)
    tile_columns = (columns + WIDTH_A - 1) // WIDTH_A
    top = tile // tile_columns * HEIGHT
    left = tile % tile_columns * WIDTH_A
    packing: tl.constexpr = 2 if PACKED else 1
    source = address(row_data, row, ROW_DATA, 1) + (top * columns + left) // packing
    target = address(column_data, row, COLUMN_DATA, 1) + (left * rows + top) // packing
    aligned = (source % 16 == 0) & (target % 16 == 0) & (rows % 32 == 0) & (columns % 32 == 0)
    if aligned & (top + HEIGHT <= rows) & (left + WIDTH_A <= columns):
        _tile(source, target, rows, columns, top, left, HEIGHT, WIDTH_A, packing, True)
    else:
        _tile(source, target, rows, columns, top, left, HEIGHT, WIDTH_A, packing, False)


@triton.jit
def _tile(
    source,
    target,
    rows,
    columns,
    top,
    left,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    PACKING: tl.constexpr,
    FULL: tl.constexpr,
):
    """Transpose one tile. With two codes a byte rows and columns are even, so no byte is split."""
    width: tl.constexpr = WIDTH_A // PACKING
    height: tl.constexpr = HEIGHT // PACKING
    mask = (top + tl.arange(0, HEIGHT)[:, None] < rows) & (left + PACKING * tl.arange(0, width)[None, :] < columns)
    data = load_raw(source, offsets(columns // PACKING, HEIGHT, width, FULL), mask, tl.uint8, FULL)
    if PACKING == 2:
        low, high = data & 0xF, data >> 4
        codes = tl.reshape(tl.join(low, high), (HEIGHT, WIDTH_A))
        even, odd = tl.split(tl.reshape(tl.trans(codes), (WIDTH_A, height, 2)))
        data = even | (odd << 4)
    else:
        data = tl.trans(data)
    mask = (left + tl.arange(0, WIDTH_A)[:, None] < columns) & (top + PACKING * tl.arange(0, height)[None, :] < rows)
    store_raw(target, offsets(rows // PACKING, WIDTH_A, height, FULL), data, mask, tl.uint8, FULL)


@triton.jit(do_not_specialize=["n"])
def _scales(
    table,
    firsts,
    n,
    row_scales,
    column_scales,
    TRANSPOSED: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    REPEAT: tl.constexpr,
    REPEAT_COLUMNS: tl.constexpr,
    ROUND_ROWS: tl.constexpr,
    ROUND_COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH_A: tl.constexpr,
    RULE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    i, j, at, in_buffer, in_grid = buffer_tile(
        row,
        tile - tl.load(firsts + weight),
        TRANSPOSED,
        ROWS_A,
        COLUMNS_A,
        REPEAT,
        REPEAT_COLUMNS,
        ROUND_ROWS,
        ROUND_COLUMNS,
        HEIGHT,
        WIDTH_A,
    )
    block_columns = (tl.load(row + COLUMNS) + COLUMNS_A - 1) // COLUMNS_A
    width = (block_columns + ROUND_COLUMNS - 1) // ROUND_COLUMNS * ROUND_COLUMNS
    source = j * REPEAT * width + i
    if RULE == FP32:
        scale = tl.load(
            address(row_scales, row, ROW_SCALE, 4).to(tl.pointer_type(tl.float32)) + source, mask=in_grid, other=1
        )
    else:
        scale = tl.load(
            address(row_scales, row, ROW_SCALE, 1).to(tl.pointer_type(tl.uint8)) + source, mask=in_grid, other=0
        )
    store_scales(column_scales, row, COLUMN_SCALE, at, scale, in_buffer, in_grid, RULE)
