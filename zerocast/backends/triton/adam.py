"""The AdamW update inside a kernel, each line one f32 operation an element (README.md of the backends has the formula)."""

import triton
import triton.language as tl

from zerocast.backends.triton.tiles import load_f32, store_f32


@triton.jit
def adamw(p, g, m, v, scalars, clip):
    """The new (master, exp_avg, exp_avg_sq) from f32 blocks; `scalars` points to a group's row."""
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
    """Update the elements `i` behind four addresses in place; returns the new master, with anything where masked."""
    p = load_f32(p_at, i, mask, tl.float32, FULL)
    g = load_f32(g_at, i, mask, GRAD, FULL)
    m = load_f32(m_at, i, mask, EXP_AVG, FULL)
    v = load_f32(v_at, i, mask, EXP_AVG_SQ, FULL)
    p, m, v = adamw(p, g, m, v, scalars, clip)
    store_f32(p_at, i, p, mask, tl.float32, FULL)
    store_f32(m_at, i, m, mask, EXP_AVG, FULL)
    store_f32(v_at, i, v, mask, EXP_AVG_SQ, FULL)
    return p
