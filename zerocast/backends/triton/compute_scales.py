"""Stage compute_scales: complete scale buffers and tensor amaxes from the reduced amaxes. Stage
roll_history: the scales of the next cast with delayed scaling (docs/formats/fp8_delayed.md).
"""

import struct
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.triton.amaxes import as_integers, load_amax
from zerocast.backends.triton.codec import INF, as_f32, magnitude
from zerocast.backends.triton.launch import (
    AMAX,
    COLUMN_AMAX,
    COLUMN_SCALE,
    COLUMNS,
    HISTORY,
    ROW_AMAX,
    ROW_SCALE,
    ROWS,
    SCALE,
    SHARED_AMAX,
    WIDTH,
    address,
    addresses,
    find,
    launch,
    skip_flag,
    tiling,
)
from zerocast.backends.triton.scale_buffers import ScaleBuffer, buffer_tile, store_scales
from zerocast.backends.triton.scales import (
    TWO_LEVEL,
    group_constants,
    rule_constants,
    scale_from_amax,
    stored_amax,
    stored_scale,
    two_level_global,
)
from zerocast.formats import AmaxPolicy, Columnwise, FormatSpec
from zerocast.formats.layout import amax_grid

# The amaxes of one program of `_grid_maxima`.
RUN = 4096


@dataclass(frozen=True)
class _GridRuns:
    """Splits the rowwise amaxes into runs of `size`, for formats whose tensor amax is their
    maximum.
    """

    fmt: FormatSpec
    size: int

    def count(self, row: list[int]) -> int:
        """Return the number of runs of one weight."""
        block_rows, block_columns = amax_grid(self.fmt.block, row[Column.ROWS], row[Column.COLUMNS])
        return -(-block_rows * block_columns // self.size) if self.fmt.has_tensor_amax else 0


def _maxima_of_runs(fmt: FormatSpec, words: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the largest amax of each run as bits, the first run of each weight), for
    `_largest_of`. Two-level scales need the tensor amax. This is a separate launch, since no
    program of a launch may wait for the result of another one.
    """
    assert fmt.block
    runs = tiling(table, _GridRuns(fmt, RUN))
    maxima = torch.empty(max(1, runs.total), dtype=torch.int32, device=table.device)
    grid = {"ROWS_A": fmt.block[0], "COLUMNS_A": fmt.block[1]}
    launch(_grid_maxima, runs.total, table.device, words, table, runs.firsts, runs.rows, maxima, **grid, SIZE=RUN)
    return maxima, runs.firsts


def compute_scales(
    fmt: FormatSpec,
    packed: Tensor,
    table: Tensor,
    row_scales: list[Tensor],
    column_scales: list[Tensor],
    amaxes: list[Tensor],
    scales: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Write scale buffers, padding included, and tensor amaxes from the reduced packed amaxes."""
    device, words, flag = table.device, as_integers(packed), skip_flag(skip, table.device)
    rule, tensor_amaxes = rule_constants(fmt), addresses(amaxes, device)
    if fmt.block is None:
        rule = {key: value for key, value in rule.items() if key != "RULE"}
        arguments = words, table, addresses(row_scales, device), tensor_amaxes, addresses(scales, device), flag
        is_delayed = fmt.amax_policy is AmaxPolicy.DELAYED
        launch(_tensor, table.shape[0], device, *arguments, DELAYED=is_delayed, **rule, num_warps=1)
        return
    maxima = _maxima_of_runs(fmt, words, table)
    directions = [(ScaleBuffer.rowwise(fmt), row_scales, ROW_AMAX, ROW_SCALE)]
    if fmt.columnwise in (Columnwise.OWN_GRID, Columnwise.SHARED):
        place = ROW_AMAX if fmt.columnwise is Columnwise.SHARED else COLUMN_AMAX
        directions.append((ScaleBuffer.columnwise(fmt), column_scales, place, COLUMN_SCALE))
    for buffer, buffers, place, base in directions:
        tiles = tiling(table, buffer)
        head = words, table, tiles.firsts, tiles.rows, addresses(buffers, device)
        largest = *maxima, tensor_amaxes, flag
        constants = buffer.constants() | rule | group_constants(fmt) | {"PLACE": place.value, "BASE": base.value}
        launch(_blocks, tiles.total, device, *head, *largest, **constants, num_warps=8)


@triton.jit
def _tensor(
    packed,
    table,
    row_scales,
    amaxes,
    scales,
    skip,
    DELAYED: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Compute one scale for the tensor; one program for each weight."""
    if tl.load(skip) != 0:
        return
    row = table + tl.program_id(0).to(tl.int64) * WIDTH
    amax = load_amax(packed, tl.load(row + ROW_AMAX), True)
    tl.store(address(amaxes, row, AMAX, 4).to(tl.pointer_type(tl.float32)), amax)
    if DELAYED:
        scale = tl.load(address(scales, row, SCALE, 4).to(tl.pointer_type(tl.float32)))
    else:
        scale = scale_from_amax(amax, LARGEST, POWER_OF_2, EPSILON)
    tl.store(address(row_scales, row, ROW_SCALE, 4).to(tl.pointer_type(tl.float32)), tl.div_rn(1.0, scale))


@triton.jit(do_not_specialize=["n"])
def _grid_maxima(packed, table, firsts, n, maxima, ROWS_A: tl.constexpr, COLUMNS_A: tl.constexpr, SIZE: tl.constexpr):
    """Compute the largest amax of each run, as bits."""
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    block_rows = (tl.load(row + ROWS) + ROWS_A - 1) // ROWS_A
    block_columns = (tl.load(row + COLUMNS) + COLUMNS_A - 1) // COLUMNS_A
    i = (tile - tl.load(firsts + weight)) * SIZE + tl.arange(0, SIZE)
    amax = load_amax(packed, tl.load(row + ROW_AMAX) + i, i < block_rows * block_columns)
    shared = tl.load(row + SHARED_AMAX)
    amax = tl.maximum(amax, load_amax(packed, shared, shared >= 0))
    tl.store(maxima + tile, tl.max(magnitude(amax), 0))


@triton.jit
def _largest_of(maxima, first, last):
    """Return the tensor amax of a weight whose runs are `[first, last)`."""
    largest = tl.zeros((128,), tl.int32)
    while first < last:
        i = first + tl.arange(0, 128)
        largest = tl.maximum(largest, tl.load(maxima + i, mask=i < last, other=0))
        first += 128
    return as_f32(tl.max(largest, 0))


@triton.jit(do_not_specialize=["n"])
def _blocks(
    packed,
    table,
    firsts,
    n,
    bases,
    maxima,
    runs,
    amaxes,
    skip,
    PLACE: tl.constexpr,
    BASE: tl.constexpr,
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
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EPSILON: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    ROUNDS_DOWN: tl.constexpr,
):
    """Fill a tile of a scale buffer with one scale for each block, padding included."""
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    tile -= tl.load(firsts + weight)
    i, j, at, in_buffer, in_grid = buffer_tile(
        row, tile, TRANSPOSED, ROWS_A, COLUMNS_A, REPEAT, REPEAT_COLUMNS, ROUND_ROWS, ROUND_COLUMNS, HEIGHT, WIDTH_A
    )
    block_columns = (tl.load(row + COLUMNS) + COLUMNS_A - 1) // COLUMNS_A
    amax = load_amax(packed, tl.load(row + PLACE) + i * block_columns + j, in_grid)
    s_enc = tl.full((), 1.0, tl.float32)
    if RULE >= TWO_LEVEL:
        largest = _largest_of(maxima, tl.load(runs + weight), tl.load(runs + weight + 1))
        largest = stored_amax(largest, RULE)
        s_enc = two_level_global(largest)
        if tile == 0:
            tl.store(address(amaxes, row, AMAX, 4).to(tl.pointer_type(tl.float32)), largest)
    group = amax
    if GROUP_ROWS:
        block_rows = (tl.load(row + ROWS) + ROWS_A - 1) // ROWS_A
        for r in tl.static_range(GROUP_ROWS):
            for c in tl.static_range(GROUP_COLUMNS):
                near_i, near_j = i // GROUP_ROWS * GROUP_ROWS + r, j // GROUP_COLUMNS * GROUP_COLUMNS + c
                near = in_grid & (near_i < block_rows) & (near_j < block_columns)
                group = tl.maximum(
                    group, load_amax(packed, tl.load(row + PLACE) + near_i * block_columns + near_j, near)
                )
    scale = stored_scale(amax, group, s_enc, RULE, LARGEST, POWER_OF_2, EPSILON, GROUP_ROWS > 0, ROUNDS_DOWN)
    store_scales(bases, row, BASE, at, scale, in_buffer, in_grid, RULE)


def roll_history(
    fmt: FormatSpec,
    table: Tensor,
    amaxes: list[Tensor],
    scales: list[Tensor],
    histories: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Shift each amax history by one and write the scale of the next cast."""
    assert fmt.element
    device = table.device
    bases = [addresses(tensors, device) for tensors in (amaxes, scales, histories)]
    launch(
        _roll,
        table.shape[0],
        device,
        table,
        *bases,
        skip_flag(skip, device),
        LENGTH=fmt.amax_history_len,
        SIZE=triton.next_power_of_2(fmt.amax_history_len),
        LARGEST=struct.unpack("<f", struct.pack("<f", fmt.element.max * 2.0**-fmt.margin))[0],
        MAX=fmt.amax_compute_algo == "max",
    )


@triton.jit
def _roll(
    table,
    amaxes,
    scales,
    histories,
    skip,
    LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX: tl.constexpr,
):
    if tl.load(skip) != 0:
        return
    row = table + tl.program_id(0).to(tl.int64) * WIDTH
    amax = tl.load(address(amaxes, row, AMAX, 4).to(tl.pointer_type(tl.float32)))
    scale_at = address(scales, row, SCALE, 4).to(tl.pointer_type(tl.float32))
    scale = tl.load(scale_at)
    history = address(histories, row, HISTORY, 4).to(tl.pointer_type(tl.float32))
    last = tl.where(amax != 0, amax, tl.load(history))
    i = tl.arange(0, SIZE)
    older = tl.load(history + i + 1, mask=i < LENGTH - 1, other=0)
    moved = tl.where(i == LENGTH - 1, last, older)
    chosen = last
    if MAX:
        # A history has no negative values and no NaN, so bits order as values do.
        chosen = as_f32(tl.max(moved.to(tl.int32, bitcast=True), 0))
    fresh = tl.div_rn(LARGEST, chosen).to(tl.int32, bitcast=True)
    finite = (chosen > 0) & (chosen.to(tl.int32, bitcast=True) < INF)
    fresh = tl.where(finite, fresh, scale.to(tl.int32, bitcast=True))
    fresh = tl.where(fresh == INF, 0x7F7FFFFF, fresh)
    # The history is shifted in place, so all of it must be read before any of it is written.
    tl.debug_barrier()
    if last != 0:
        tl.store(history + i, tl.where(i == 0, 0.0, moved), mask=i < LENGTH)
        tl.store(scale_at, as_f32(fresh))
