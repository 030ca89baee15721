"""The tensor amax of two-level scales: the maxima of runs of block amaxes, which the programs of
the next launch reduce further.

This needs a separate launch, since no program of a launch may wait for the result of another one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.triton.amaxes import load_amax
from zerocast.backends.triton.codec import as_f32, magnitude
from zerocast.backends.triton.launch import COLUMNS, ROW_AMAX, ROWS, SHARED_AMAX, WIDTH, find, launch, tiling
from zerocast.formats import FormatSpec
from zerocast.formats.layout import amax_grid

RUN = 4096


@dataclass(frozen=True)
class GridRuns:
    """Splits the rowwise amaxes into runs of `size`, for formats whose tensor amax is their
    maximum.
    """

    fmt: FormatSpec
    size: int

    def count(self, row: list[int]) -> int:
        """Return the number of runs of one weight."""
        down, across = amax_grid(self.fmt.block, row[Column.ROWS], row[Column.COLUMNS])
        return -(-down * across // self.size) if self.fmt.has_tensor_amax else 0


def grid_maxima(fmt: FormatSpec, words: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the largest amax of each run as bits, the first run of each weight), for
    `largest_of`.
    """
    assert fmt.block
    runs = tiling(table, GridRuns(fmt, RUN))
    maxima = torch.empty(max(1, runs.total), dtype=torch.int32, device=table.device)
    grid = {"ROWS_A": fmt.block[0], "COLUMNS_A": fmt.block[1]}
    launch(_grid_maxima, runs.total, table.device, words, table, runs.firsts, runs.rows, maxima, **grid, SIZE=RUN)
    return maxima, runs.firsts


@triton.jit(do_not_specialize=["n"])
def _grid_maxima(packed, table, firsts, n, maxima, ROWS_A: tl.constexpr, COLUMNS_A: tl.constexpr, SIZE: tl.constexpr):
    """Compute the largest amax of each run, as bits."""
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    down = (tl.load(row + ROWS) + ROWS_A - 1) // ROWS_A
    across = (tl.load(row + COLUMNS) + COLUMNS_A - 1) // COLUMNS_A
    i = (tile - tl.load(firsts + weight)) * SIZE + tl.arange(0, SIZE)
    amax = load_amax(packed, tl.load(row + ROW_AMAX) + i, i < down * across)
    shared = tl.load(row + SHARED_AMAX)
    amax = tl.maximum(amax, load_amax(packed, shared, shared >= 0))
    tl.store(maxima + tile, tl.max(magnitude(amax), 0))


@triton.jit
def largest_of(maxima, first, last):
    """Return the tensor amax of a weight whose runs are `[first, last)`."""
    largest = tl.zeros((128,), tl.int32)
    while first < last:
        i = first + tl.arange(0, 128)
        largest = tl.maximum(largest, tl.load(maxima + i, mask=i < last, other=0))
        first += 128
    return as_f32(tl.max(largest, 0))
