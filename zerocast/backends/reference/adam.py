"""The Adam stages in plain torch: `adam_step` on flat shards, `adam_amax` with the amaxes of the
new masters, and `adam_cast` with their codes as well, for spans of whole rows of blocks.
"""

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column, check_whole_blocks
from zerocast.backends.reference.stages import partial_amax, partial_cast
from zerocast.formats import FormatSpec


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
    """Stage adam_step: run Adam in place over the segments of one flat shard."""
    if skip is not None and bool(skip):
        return
    for offset, numel, group in segments.tolist():
        s = slice(offset, offset + numel)
        p, m, v = adamw(master[s], grad[s].float(), exp_avg[s].float(), exp_avg_sq[s].float(), scalars[group], clip)
        master[s] = p
        # The assignment rounds to bf16 if the moments are bf16.
        exp_avg[s] = m
        exp_avg_sq[s] = v


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scalars: Tensor, clip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The AdamW update of f32 tensors as a pure function; returns the new (p, m, v).

    Each line is one f32 operation on an element, in the order that ../README.md fixes.
    """
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_c2, eps = scalars.unbind()
    g = g * clip
    p = p * decay
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + (one_minus_beta2 * g) * g
    p = p - step_size * (m / (square_root(v) / root_c2 + eps))
    return p, m, v


def square_root(x: Tensor) -> Tensor:
    """The correctly rounded f32 square root; torch.sqrt on the CPU is often off by one ulp."""
    return x.double().sqrt().float()


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
    """Stage adam_amax: run Adam over the owned spans, then take the amaxes of the new masters."""
    if skip is not None and bool(skip):
        return
    owned = table[:, Column.NUMEL] > 0
    segments = torch.stack((table[:, Column.MASTER_OFFSET], table[:, Column.NUMEL], groups), 1)
    for base, state in enumerate(zip(masters, grads, exp_avgs, exp_avg_sqs, strict=True)):
        here = owned & (table[:, Column.MASTER_BASE] == base)
        adam_step(*state, segments[here], scalars, clip, None)
    partial_amax(fmt, nominal, masters, table, packed)


def adam_cast(
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
    row_data: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Stage adam_cast: adam_amax, then partial_cast with the amaxes that this rank took. No other
    rank owns an element of the same blocks.
    """
    check_whole_blocks(fmt, table)
    adam_amax(fmt, nominal, masters, grads, exp_avgs, exp_avg_sqs, table, groups, scalars, clip, packed, skip)
    partial_cast(fmt, nominal, masters, packed, [], [], table, row_data, [], skip)
