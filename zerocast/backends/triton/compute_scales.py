"""Stage compute_scales: complete scale buffers and tensor amaxes from the reduced amaxes."""

import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.amaxes import as_integers, load_amax
from zerocast.backends.triton.launch import (
    AMAX,
    COLUMN_AMAX,
    COLUMN_SCALE,
    COLUMNS,
    ROW_AMAX,
    ROW_SCALE,
    ROWS,
    SCALE,
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
from zerocast.backends.triton.tensor_amax import grid_maxima, largest_of
from zerocast.formats import AmaxPolicy, Columnwise, FormatSpec


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
    maxima = grid_maxima(fmt, words, table)
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
    across = (tl.load(row + COLUMNS) + COLUMNS_A - 1) // COLUMNS_A
    amax = load_amax(packed, tl.load(row + PLACE) + i * across + j, in_grid)
    s_enc = tl.full((), 1.0, tl.float32)
    if RULE >= TWO_LEVEL:
        largest = largest_of(maxima, tl.load(runs + weight), tl.load(runs + weight + 1))
        largest = stored_amax(largest, RULE)
        s_enc = two_level_global(largest)
        if tile == 0:
            tl.store(address(amaxes, row, AMAX, 4).to(tl.pointer_type(tl.float32)), largest)
    group = amax
    if GROUP_ROWS:
        down = (tl.load(row + ROWS) + ROWS_A - 1) // ROWS_A
        for r in tl.static_range(GROUP_ROWS):
            for c in tl.static_range(GROUP_COLUMNS):
                near_i, near_j = i // GROUP_ROWS * GROUP_ROWS + r, j // GROUP_COLUMNS * GROUP_COLUMNS + c
                near = in_grid & (near_i < down) & (near_j < across)
                group = tl.maximum(group, load_amax(packed, tl.load(row + PLACE) + near_i * across + near_j, near))
    scale = stored_scale(amax, group, s_enc, RULE, LARGEST, POWER_OF_2, EPSILON, GROUP_ROWS > 0, ROUNDS_DOWN)
    store_scales(bases, row, BASE, at, scale, in_buffer, in_grid, RULE)
