"""Stage roll_history: delayed scaling's step of its amax history (docs/formats/fp8_delayed.md)."""

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column
from zerocast.backends.reference.scales import FLT_MAX, divide
from zerocast.formats import FormatSpec


def roll_history(
    fmt: FormatSpec,
    table: Tensor,
    amaxes: list[Tensor],
    scales: list[Tensor],
    histories: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Move each amax history by one step and write the scale of the next cast."""
    if skip is not None and bool(skip):
        return
    for row in table.tolist():
        amax = amaxes[row[Column.AMAX_BASE]][row[Column.AMAX_OFFSET] :][:1]
        scale = scales[row[Column.SCALE_BASE]][row[Column.SCALE_OFFSET] :][:1]
        history = histories[row[Column.HISTORY_BASE]][row[Column.HISTORY_OFFSET] :][: fmt.amax_history_len]
        next_history, next_scale = rolled(fmt, amax, scale, history)
        history.copy_(next_history)
        scale.copy_(next_scale)


def rolled(fmt: FormatSpec, amax: Tensor, scale: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """The history and the scale after a step whose reduced amax is `amax`; f32[L] and f32[1]. No host synchronisation."""
    assert fmt.element
    last = torch.where(amax != 0, amax, history[:1])
    moved = torch.cat((torch.zeros_like(last), history[2:], last))[: history.numel()]
    chosen = last
    if fmt.amax_compute_algo == "max":
        chosen = torch.cat((history[1:], last)).amax().view(1)
    fresh = divide(fmt.element.max * 2.0**-fmt.margin, chosen)
    fresh = torch.where((chosen > 0) & (chosen < torch.inf), fresh, scale)
    fresh = torch.where(fresh.isinf(), torch.full_like(fresh, FLT_MAX), fresh)
    idle = last == 0
    return torch.where(idle, history, moved), torch.where(idle, scale, fresh)
