"""Stage adam_step: AdamW on flat FP32 shards, with FP32 or bf16 moments."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.codec import DTYPES
from zerocast.backends.triton.launch import addresses, find, launch, skip_flag, tiling
from zerocast.backends.triton.tiles import load_f32, store_f32


@triton.jit
def adamw(p, g, m, v, scalars, clip):
    """The new (master, exp_avg, exp_avg_sq) from f32 blocks; `scalars` points to a group's row.

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


RUN = 2048
REGISTERS = 128


@dataclass(frozen=True)
class SegmentRuns:
    """Cuts segments, rows of (offset, numel, row of scalars), into runs of `size` elements."""

    size: int

    def count(self, row: list[int]) -> int:
        """The number of runs of one segment."""
        return -(-row[1] // self.size)


def adam_step(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    segments: Tensor,
    scalars: Tensor,
    clip: Tensor,
    skip: Tensor | None,
) -> None:
    """Run Adam over the segments of one flat shard: masters and moments in place."""
    device = master.device
    tiles = tiling(segments, SegmentRuns(RUN))
    bases = addresses((master, grad, exp_avg, exp_avg_sq), device)
    head = bases, segments, tiles.firsts, tiles.rows, scalars, clip, skip_flag(skip, device)
    dtypes = {"GRAD": DTYPES[grad.dtype], "EXP_AVG": DTYPES[exp_avg.dtype], "EXP_AVG_SQ": DTYPES[exp_avg_sq.dtype]}
    launch(_run, tiles.total, device, *head, SIZE=RUN, **dtypes, registers=REGISTERS)


@triton.jit(do_not_specialize=["n"])
def _run(
    bases,
    segments,
    firsts,
    n,
    scalars,
    clip,
    skip,
    SIZE: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
):
    if tl.load(skip) != 0:
        return
    tile = tl.program_id(0).to(tl.int64)
    segment = find(firsts, n, tile)
    row = segments + segment * 3
    first = (tile - tl.load(firsts + segment)) * SIZE
    left = tl.load(row + 1) - first
    first += tl.load(row)
    group = scalars + tl.load(row + 2) * 8
    g_size: tl.constexpr = 4 if GRAD == tl.float32 else 2
    m_size: tl.constexpr = 4 if EXP_AVG == tl.float32 else 2
    v_size: tl.constexpr = 4 if EXP_AVG_SQ == tl.float32 else 2
    p_at = tl.load(bases) + first * 4
    g_at = tl.load(bases + 1) + first * g_size
    m_at = tl.load(bases + 2) + first * m_size
    v_at = tl.load(bases + 3) + first * v_size
    i = tl.arange(0, SIZE)
    if (left >= SIZE) & ((p_at | g_at | m_at | v_at) % 16 == 0):
        update(p_at, g_at, m_at, v_at, i, True, group, clip, GRAD, EXP_AVG, EXP_AVG_SQ, True)
    else:
        update(p_at, g_at, m_at, v_at, i, i < left, group, clip, GRAD, EXP_AVG, EXP_AVG_SQ, False)
