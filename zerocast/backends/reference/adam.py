"""Stage adam_amax in plain torch: the update, then the amaxes of the new masters."""

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.reference.stages import partial_amax
from zerocast.formats import FormatSpec


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scalars: Tensor, clip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the AdamW update of f32 tensors as a pure function: the new (p, m, v).

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
    """Return the correctly rounded f32 square root; torch.sqrt on the CPU is often off by one
    ulp.
    """
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
    for row, group in zip(table.tolist(), groups.tolist(), strict=True):
        base, offset, numel = row[Column.MASTER_BASE], row[Column.MASTER_OFFSET], row[Column.NUMEL]
        if numel:
            state = (tensors[base][offset : offset + numel] for tensors in (masters, grads, exp_avgs, exp_avg_sqs))
            master, grad, exp_avg, exp_avg_sq = state
            p, m, v = adamw(master, grad.float(), exp_avg.float(), exp_avg_sq.float(), scalars[group], clip)
            master.copy_(p)
            # The copies round to bf16 if the moments are bf16.
            exp_avg.copy_(m)
            exp_avg_sq.copy_(v)
    partial_amax(fmt, nominal, masters, table, packed)
