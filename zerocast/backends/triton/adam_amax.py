"""Stage adam_amax: the AdamW update and the partial amaxes of the updated masters, in one pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    store_f32,
)
from zerocast.formats import FormatSpec

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
        launch(_run, tiles.total, device, *head, SIZE=RUN, **constants, registers=REGISTERS)


@triton.jit
def adamw(p, g, m, v, scalars, clip):
    """Return the new (master, exp_avg, exp_avg_sq) from f32 blocks; `scalars` points to a group's
    row.

    Each line is one f32 operation on an element, in the order that ../README.md fixes.
    """
    decay = tl.load(scalars)
    beta1 = tl.load(scalars + 1)
    one_minus_beta1 = tl.load(scalars + 2)
    beta2 = tl.load(scalars + 3)
    one_minus_beta2 = tl.load(scalars + 4)
    step_size = tl.load(scalars + 5)
    root_c2 = tl.load(scalars + 6)
    eps = tl.load(scalars + 7)
    g = g * tl.load(clip)
    p = p * decay
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + (one_minus_beta2 * g) * g
    p = p - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root_c2) + eps)
    return p, m, v


@triton.jit
def update(
    p_at,
    g_at,
    m_at,
    v_at,
    i,
    mask,
    scalars,
    clip,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update elements `i` at four addresses in place; returns the new master, undefined where
    masked.
    """
    p = load_f32(p_at, i, mask, tl.float32, FULL)
    g = load_f32(g_at, i, mask, GRAD, FULL)
    m = load_f32(m_at, i, mask, EXP_AVG, FULL)
    v = load_f32(v_at, i, mask, EXP_AVG_SQ, FULL)
    p, m, v = adamw(p, g, m, v, scalars, clip)
    store_f32(p_at, i, p, mask, tl.float32, FULL)
    store_f32(m_at, i, m, mask, EXP_AVG, FULL)
    store_f32(v_at, i, v, mask, EXP_AVG_SQ, FULL)
    return p


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
    """Return the addresses of element `first` of the weight in the four parallel bases."""
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
    NOMINAL: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
):
    """Update a run of elements of a format without blocks, with one amax for the tensor."""
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
    """Update a band of full block rows, with one amax for each block."""
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
