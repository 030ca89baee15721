"""Stage adam_amax: the AdamW update and the partial amaxes of the updated masters, in one pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.adam_step import update
from zerocast.backends.triton.amaxes import amax_bits, as_integers, max_into, note_not_finite
from zerocast.backends.triton.codec import DTYPES, magnitude, round_nominal
from zerocast.backends.triton.launch import (
    COLUMNS,
    NUMEL,
    ROW_AMAX,
    START,
    WIDTH,
    addresses,
    find,
    launch,
    skip_flag,
    tiling,
)
from zerocast.backends.triton.partial_amax import store_amaxes
from zerocast.backends.triton.tiles import Bands, Flat, TileShape, band_tile, element, is_owned, offsets, owned
from zerocast.formats import AmaxPolicy, FormatSpec

RUN = 2048
REGISTERS = 128


def adam_amax(
    fmt: FormatSpec,
    nominal: torch.dtype,
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    table: Tensor,
    groups: Tensor,
    scalars: Tensor,
    clip: Tensor,
    packed: Tensor,
    skip: Tensor | None,
) -> None:
    """Run Adam over the owned spans and take the partial amaxes in the same pass.

    `masters` are FP32; each other list has one dtype.
    """
    if not masters:
        return
    device = table.device
    shape = TileShape.for_amaxes(fmt, RUN) if fmt.block else None
    tiles = tiling(table, Bands(shape.band, shape.width) if shape else Flat(RUN))
    bases = [addresses(tensors, device) for tensors in (masters, grads, exp_avgs, exp_avg_sqs)]
    update_of = groups, scalars, clip, as_integers(packed), skip_flag(skip, device)
    head = *bases, table, tiles.firsts, tiles.rows, *update_of
    constants: dict[str, Any] = {"NOMINAL": DTYPES[nominal], "GRAD": DTYPES[grads[0].dtype]}
    constants |= {"EXP_AVG": DTYPES[exp_avgs[0].dtype], "EXP_AVG_SQ": DTYPES[exp_avg_sqs[0].dtype]}
    if shape:
        launch(_blocks, tiles.total, device, *head, **shape.constants(), **constants, num_warps=8, registers=REGISTERS)
    else:
        has_amax = fmt.amax_policy is not AmaxPolicy.NONE
        launch(_run, tiles.total, device, *head, SIZE=RUN, HAS_AMAX=has_amax, **constants, registers=REGISTERS)


@triton.jit
def _addresses(
    masters,
    grads,
    exp_avgs,
    exp_avg_sqs,
    row,
    first,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
):
    """Addresses of element `first` of the weight in the four parallel bases."""
    p_at = element(masters, row, first, tl.float32)
    g_at = element(grads, row, first, GRAD)
    m_at = element(exp_avgs, row, first, EXP_AVG)
    v_at = element(exp_avg_sqs, row, first, EXP_AVG_SQ)
    return p_at, g_at, m_at, v_at


@triton.jit(do_not_specialize=["n"])
def _run(
    masters,
    grads,
    exp_avgs,
    exp_avg_sqs,
    table,
    firsts,
    n,
    groups,
    scalars,
    clip,
    packed,
    skip,
    SIZE: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    NOMINAL: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
):
    """A run of elements of a format without blocks: one amax for the tensor, or none."""
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    group = scalars + tl.load(groups + weight) * 8
    first = (tile - tl.load(firsts + weight)) * SIZE
    left = tl.load(row + NUMEL) - first
    p_at, g_at, m_at, v_at = _addresses(
        masters, grads, exp_avgs, exp_avg_sqs, row, tl.load(row + START) + first, GRAD, EXP_AVG, EXP_AVG_SQ
    )
    i = tl.arange(0, SIZE)
    if (left >= SIZE) & ((p_at | g_at | m_at | v_at) % 16 == 0):
        p = update(p_at, g_at, m_at, v_at, i, True, group, clip, GRAD, EXP_AVG, EXP_AVG_SQ, True)
    else:
        p = update(p_at, g_at, m_at, v_at, i, i < left, group, clip, GRAD, EXP_AVG, EXP_AVG_SQ, False)
    if HAS_AMAX:
        bits = tl.where(i < left, amax_bits(round_nominal(p, NOMINAL)), 0)
        max_into(packed, tl.load(row + ROW_AMAX), tl.max(bits, 0))
        note_not_finite(packed, row, tl.max(tl.where(i < left, magnitude(p), 0), 0))


@triton.jit
def _update_band(
    masters,
    grads,
    exp_avgs,
    exp_avg_sqs,
    row,
    group,
    clip,
    first_row,
    first_column,
    HEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH_A: tl.constexpr,
    NOMINAL: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update the STEPS tiles of a band; returns (their elementwise largest |x| as bits
    `[HEIGHT, WIDTH_A]`, the largest of all with NaN above Inf).
    """
    columns = tl.load(row + COLUMNS)
    i = offsets(columns, HEIGHT, WIDTH_A, FULL)
    largest, worst = tl.zeros((HEIGHT, WIDTH_A), tl.int32), tl.zeros((HEIGHT, WIDTH_A), tl.int32)
    for step in range(STEPS):
        top = first_row + step * HEIGHT
        p_at, g_at, m_at, v_at = _addresses(
            masters, grads, exp_avgs, exp_avg_sqs, row, top * columns + first_column, GRAD, EXP_AVG, EXP_AVG_SQ
        )
        mask = owned(row, top, first_column, HEIGHT, WIDTH_A)
        p = update(p_at, g_at, m_at, v_at, i, mask, group, clip, GRAD, EXP_AVG, EXP_AVG_SQ, FULL)
        largest = tl.maximum(largest, tl.where(mask, amax_bits(round_nominal(p, NOMINAL)), 0))
        worst = tl.maximum(worst, tl.where(mask, magnitude(p), 0))
    return largest, tl.max(tl.max(worst, 1), 0)


@triton.jit(do_not_specialize=["n"])
def _blocks(
    masters,
    grads,
    exp_avgs,
    exp_avg_sqs,
    table,
    firsts,
    n,
    groups,
    scalars,
    clip,
    packed,
    skip,
    HEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH_A: tl.constexpr,
    ROWS_A: tl.constexpr,
    COLUMNS_A: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    OWN_COLUMNS: tl.constexpr,
    NOMINAL: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
):
    """A band of whole block rows: one amax for each block."""
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    weight = find(firsts, n, tile)
    row = table + weight * WIDTH
    group = scalars + tl.load(groups + weight) * 8
    top, left = band_tile(row, tile - tl.load(firsts + weight), HEIGHT * STEPS, WIDTH_A)
    columns = tl.load(row + COLUMNS)
    p_at, g_at, m_at, v_at = _addresses(
        masters, grads, exp_avgs, exp_avg_sqs, row, top * columns + left, GRAD, EXP_AVG, EXP_AVG_SQ
    )
    aligned = ((p_at | g_at | m_at | v_at) % 16 == 0) & (columns % 16 == 0)
    if is_owned(row, top, left, HEIGHT * STEPS, WIDTH_A) & aligned:
        m, worst = _update_band(
            masters, grads, exp_avgs, exp_avg_sqs, row, group, clip, top, left,
            HEIGHT, STEPS, WIDTH_A, NOMINAL, GRAD, EXP_AVG, EXP_AVG_SQ, True,
        )  # fmt: skip
    else:
        m, worst = _update_band(
            masters, grads, exp_avgs, exp_avg_sqs, row, group, clip, top, left,
            HEIGHT, STEPS, WIDTH_A, NOMINAL, GRAD, EXP_AVG, EXP_AVG_SQ, False,
        )  # fmt: skip
    note_not_finite(packed, row, worst)
    store_amaxes(packed, row, m, top, left, HEIGHT, STEPS, WIDTH_A, ROWS_A, COLUMNS_A, OWN_ROWS, OWN_COLUMNS)
