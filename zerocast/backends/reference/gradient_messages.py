"""The messages of gradients that are sent as FP8 (docs/formats/fp8_1x128.md), and the sum of what
ranks send, in plain torch.
"""

import torch
from torch import Tensor

from zerocast.backends.reference.codec import decode_e4m3, encode_e4m3
from zerocast.backends.reference.scales import FLT_MAX, divide
from zerocast.formats.layout import GradientMessage


def quantize_gradient(grad: Tensor, parts: int, messages: Tensor) -> None:
    """Stage quantize_gradient: write the message of each of `parts` equal parts of a gradient."""
    layout = GradientMessage(grad.numel() // parts)
    groups = torch.zeros(parts, layout.groups * layout.GROUP, dtype=torch.float32, device=grad.device)
    groups[:, : layout.numel] = grad.view(parts, -1)
    groups = groups.view(parts, layout.groups, layout.GROUP)
    # torch's maximum is NaN if any element is.
    amax = groups.abs().amax(2)
    scale = divide(448.0, amax).clamp(max=FLT_MAX).masked_fill(amax == 0, 1.0)
    scale = scale.masked_fill(~amax.isfinite(), torch.nan)
    codes = encode_e4m3(groups * scale.unsqueeze(2)).view(parts, -1)
    # A NaN may have many bit patterns; this one is the same on every device.
    scale_inv = divide(1.0, scale).masked_fill(scale.isnan(), torch.nan)
    rows = messages.view(parts, layout.nbytes).zero_()
    rows[:, : layout.numel] = codes[:, : layout.numel]
    rows[:, layout.scales_at :][:, : 4 * layout.groups] = scale_inv.view(torch.uint8)


def add_gradients(messages: Tensor, parts: int, divisor: int, adds: bool, out: Tensor) -> None:
    """Stage add_gradients: add the messages of `parts` ranks, in FP8 or in the dtype of the
    gradient, in the order of the ranks, and divide by `divisor`.
    """
    if not out.numel():
        return
    is_fp8 = messages.dtype is torch.uint8
    total, *others = [_decoded(row, out.numel()) if is_fp8 else row.float() for row in messages.view(parts, -1)]
    for value in others:
        total = total + value
    mean = total / torch.full_like(total, divisor)
    out.copy_(out + mean if adds else mean)


def _decoded(message: Tensor, numel: int) -> Tensor:
    layout = GradientMessage(numel)
    scale_inv = message[layout.scales_at :][: 4 * layout.groups].view(torch.float32)
    return decode_e4m3(message[:numel]) * scale_inv.repeat_interleave(layout.GROUP)[:numel]
