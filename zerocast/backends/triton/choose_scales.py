"""Stage choose_scales: which of its two scales each block takes whose elements are all owned."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.amaxes import amax_word, as_integers, grid_cells, load_amax
from zerocast.backends.triton.codec import DTYPES, decode, encode, round_nominal
from zerocast.backends.triton.launch import COLUMNS, NUMEL, ROW_AMAX, START, WIDTH, addresses, find, launch, tiling
from zerocast.backends.triton.scales import rule_of, top_of, two_level_byte, two_level_encode, two_level_global
from zerocast.backends.triton.tensor_amax import grid_maxima, largest_of
from zerocast.backends.triton.tiles import Bands, band_tile, element, load_f32
from zerocast.formats import FormatSpec

SIDE, BLOCKS = 16, 16  # rows and columns of a block; blocks of a program


def choose_scales(fmt: FormatSpec, nominal: torch.dtype, masters: list[Tensor], table: Tensor, packed: Tensor) -> None:
    """Give a minus to the amax of every owned block whose error is smaller with the code 4 for its
    amax.
    """
    if not masters:
        return
    assert fmt.block == (SIDE, SIDE), fmt
    device, words = table.device, as_integers(packed)
    maxima = grid_maxima(fmt, words, table)
    tiles = tiling(table, Bands(SIDE, SIDE * BLOCKS))
    head = addresses(masters, device), table, tiles.firsts, tiles.rows, words, *maxima
    dtypes = {"DTYPE": DTYPES[masters[0].dtype], "NOMINAL": DTYPES[nominal]}
    launch(_choose, tiles.total, device, *head, RULE=rule_of(fmt), SQUARES=fmt.four_over_six == "mse", **dtypes)


@triton.jit
def _error(x, scale, byte, tensor_amax, RULE: tl.constexpr, SQUARES: tl.constexpr):
    value = (decode(encode(x * scale, "e2m1"), "e2m1") * decode(byte, "e4m3")) * tensor_amax
    difference = tl.div_rn(value, tl.full(value.shape, top_of(RULE), tl.float32)) - x
    return difference * difference if SQUARES else tl.abs(difference)


@triton.jit
def _sum_of_rows(sums, ACROSS: tl.constexpr):
    """Rows 8, 4, 2 and 1 apart are added: a sum of two has no order."""
    sums = tl.sum(tl.reshape(sums, (2, 8, ACROSS)), 0)
    sums = tl.sum(tl.reshape(sums, (2, 4, ACROSS)), 0)
    sums = tl.sum(tl.reshape(sums, (2, 2, ACROSS)), 0)
    return tl.sum(tl.reshape(sums, (2, 1, ACROSS)), 0)


@triton.jit(do_not_specialize=["n"])
def _choose(
    masters,
    table,
    firsts,
    n,
    packed,
    maxima,
    runs,
    RULE: tl.constexpr,
    SQUARES: tl.constexpr,
    DTYPE: tl.constexpr,
    NOMINAL: tl.constexpr,
):
    side: tl.constexpr = 16
    across: tl.constexpr = 16
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    top, left = band_tile(row, tile - tl.load(firsts + weight), side, side * across)
    columns, start = tl.load(row + COLUMNS), tl.load(row + START)
    first = top * columns + left + side * tl.arange(0, across)[None, :]
    last = first + (side - 1) * columns + side
    cell, exists = grid_cells(row, top, left, side, side, 1, across)
    whole = exists & (first >= start) & (last <= start + tl.load(row + NUMEL))
    place = packed + tl.load(row + ROW_AMAX) + cell
    amax = tl.abs(load_amax(packed, tl.load(row + ROW_AMAX) + cell, whole))
    tensor_amax = largest_of(maxima, tl.load(runs + weight), tl.load(runs + weight + 1))
    s_enc = two_level_global(tensor_amax, RULE)
    four_byte, six_byte = two_level_byte(-amax, s_enc, RULE), two_level_byte(amax, s_enc, RULE)
    four_scale, six_scale = two_level_encode(-amax, s_enc, RULE), two_level_encode(amax, s_enc, RULE)
    at = element(masters, row, top * columns + left, DTYPE)
    i = tl.arange(0, side)[:, None] * columns + side * tl.arange(0, across)[None, :]
    four, six = tl.zeros((side, across), tl.float32), tl.zeros((side, across), tl.float32)
    for c in tl.static_range(side):
        x = round_nominal(load_f32(at, i + c, whole & (i >= 0), DTYPE, False), NOMINAL)
        four += _error(x, four_scale, four_byte, tensor_amax, RULE, SQUARES)
        six += _error(x, six_scale, six_byte, tensor_amax, RULE, SQUARES)
    chosen = _sum_of_rows(four, across) < _sum_of_rows(six, across)
    signed = tl.where(chosen, -amax, amax)
    tl.store(place, amax_word(packed, signed.to(tl.int32, bitcast=True)), mask=whole)
