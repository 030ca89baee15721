"""Stage partial_amax: the amax of every block that holds an owned element."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.amaxes import (
    amax_bits,
    as_integers,
    block_max,
    max_into,
    note_not_finite,
    store_blocks,
)
from zerocast.backends.triton.codec import DTYPES, magnitude, round_nominal
from zerocast.backends.triton.launch import (
    COLUMN_AMAX,
    COLUMNS,
    NUMEL,
    ROW_AMAX,
    START,
    WIDTH,
    addresses,
    find,
    launch,
    tiling,
)
from zerocast.backends.triton.tiles import (
    Bands,
    Flat,
    TileShape,
    band_tile,
    element,
    is_owned,
    load_f32,
    offsets,
    owned,
)
from zerocast.formats import AmaxPolicy, FormatSpec

RUN = 8192


def partial_amax(fmt: FormatSpec, nominal: torch.dtype, masters: list[Tensor], table: Tensor, packed: Tensor) -> None:
    """Write the amax of every block that holds an owned element, over the owned elements."""
    if fmt.amax_policy is AmaxPolicy.NONE or not masters:
        return
    device = table.device
    bases, words = addresses(masters, device), as_integers(packed)
    dtypes = {"DTYPE": DTYPES[masters[0].dtype], "NOMINAL": DTYPES[nominal]}
    if fmt.block is None:
        tiles = tiling(table, Flat(RUN))
        launch(_run, tiles.total, device, bases, table, tiles.firsts, tiles.rows, words, SIZE=RUN, **dtypes)
        return
    shape = TileShape.for_amaxes(fmt)
    tiles = tiling(table, Bands(shape.band, shape.width))
    launch(_blocks, tiles.total, device, bases, table, tiles.firsts, tiles.rows, words, **shape.constants(), **dtypes)


@triton.jit(do_not_specialize=["n"])
def _run(
    masters,
    table,
    firsts,
    n,
    packed,
    SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    NOMINAL: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    first = (tile - tl.load(firsts + weight)) * SIZE
    left = tl.load(row + NUMEL) - first
    at = element(masters, row, tl.load(row + START) + first, DTYPE)
    i = tl.arange(0, SIZE)
    if (left >= SIZE) & (at % 16 == 0):
        x = load_f32(at, i, i < left, DTYPE, True)
    else:
        x = load_f32(at, i, i < left, DTYPE, False)
    bits = tl.max(amax_bits(round_nominal(x, NOMINAL)), 0)
    max_into(packed, tl.load(row + ROW_AMAX), bits)
    note_not_finite(packed, row, tl.max(magnitude(x), 0))


@triton.jit
def _magnitudes(
    masters,
    row,
    first_row,
    first_column,
    HEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH_A: tl.constexpr,
    DTYPE: tl.constexpr,
    NOMINAL: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return (the elementwise largest |x| of the STEPS tiles of a band, as bits `[HEIGHT,
    WIDTH_A]`, the largest of all with NaN above Inf).
    """
    columns = tl.load(row + COLUMNS)
    i = offsets(columns, HEIGHT, WIDTH_A, FULL)
    largest, worst = tl.zeros((HEIGHT, WIDTH_A), tl.int32), tl.zeros((HEIGHT, WIDTH_A), tl.int32)
    for step in range(STEPS):
        top = first_row + step * HEIGHT
        at = element(masters, row, top * columns + first_column, DTYPE)
        x = load_f32(at, i, owned(row, top, first_column, HEIGHT, WIDTH_A), DTYPE, FULL)
        largest = tl.maximum(largest, amax_bits(round_nominal(x, NOMINAL)))
        worst = tl.maximum(worst, magnitude(x))
    return largest, tl.max(tl.max(worst, 1), 0)


@triton.jit(do_not_specialize=["n"])
def _blocks(
    masters,
    table,
    firsts,
    n,
    packed,
    HEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH_A: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    OWN_COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    NOMINAL: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    top, left = band_tile(row, tile - tl.load(firsts + weight), HEIGHT * STEPS, WIDTH_A)
    columns = tl.load(row + COLUMNS)
    at = element(masters, row, top * columns + left, DTYPE)
    if is_owned(row, top, left, HEIGHT * STEPS, WIDTH_A) & (at % 16 == 0) & (columns % 16 == 0):
        m, worst = _magnitudes(masters, row, top, left, HEIGHT, STEPS, WIDTH_A, DTYPE, NOMINAL, True)
    else:
        m, worst = _magnitudes(masters, row, top, left, HEIGHT, STEPS, WIDTH_A, DTYPE, NOMINAL, False)
    note_not_finite(packed, row, worst)
    store_amaxes(packed, row, m, top, left, HEIGHT, STEPS, WIDTH_A, ROWS_A, COLUMNS_A, OWN_ROWS, OWN_COLUMNS)


@triton.jit
def store_amaxes(
    packed,
    row,
    m,
    top,
    left,
    HEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH_A: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    OWN_COLUMNS: tl.constexpr,
):
    """Reduce the magnitudes of a band to its rowwise and columnwise blocks, and store them."""
    block_rows: tl.constexpr = HEIGHT * STEPS // ROWS_A
    block_columns: tl.constexpr = WIDTH_A // COLUMNS_A
    bits = block_max(m, HEIGHT, WIDTH_A, ROWS_A // STEPS, COLUMNS_A)
    store_blocks(packed, row, ROW_AMAX, bits, top, left, ROWS_A, COLUMNS_A, block_rows, block_columns)
    if OWN_ROWS:
        own_down: tl.constexpr = HEIGHT // OWN_ROWS
        own_across: tl.constexpr = WIDTH_A // OWN_COLUMNS
        bits = block_max(m, HEIGHT, WIDTH_A, OWN_ROWS, OWN_COLUMNS)
        store_blocks(packed, row, COLUMN_AMAX, bits, top, left, OWN_ROWS, OWN_COLUMNS, own_down, own_across)
