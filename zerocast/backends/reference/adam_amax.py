"""Stage adam_amax: AdamW on the owned masters of a table, and the partial amaxes of what it made of them."""

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.reference.adam_step import adam_step
from zerocast.backends.reference.partial_amax import partial_amax
from zerocast.formats import FormatSpec


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
    """Run Adam over the owned spans and take the partial amaxes of the new masters in the same pass."""
    if skip is not None and bool(skip):
        return
    owned = table[:, Column.NUMEL] > 0
    segments = torch.stack((table[:, Column.MASTER_OFFSET], table[:, Column.NUMEL], groups), 1)
    for base, state in enumerate(zip(masters, grads, exp_avgs, exp_avg_sqs, strict=True)):
        here = owned & (table[:, Column.MASTER_BASE] == base)
        adam_step(*state, segments[here], scalars, clip, None)
    partial_amax(fmt, nominal, masters, table, packed)
