"""Path nvfp4: E2M1 with one E4M3 scale per 16 elements along the inner dimension and one FP32
factor per tensor, on both sides.

NEVER RUN: written from torch's documented interface, no Blackwell GPU was at hand. The choice, the
bytes of the input, the swizzle and the operands that the call is handed are tested on any machine.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_nvfp4_nvfp4`): A `[rows, k/2]`
bytes, B `[k/2, n]` bytes column-major, the even element in the low nibble; E4M3 scales of
`[rup(rows, 128), rup(k/16, 4)]` and `[rup(n, 128), rup(k/16, 4)]`, swizzled (torch_api.py),
contiguous; one f32 factor each, and the result is multiplied by both. k must be a multiple of 16
bytes, which are 32 elements.

Inputs and gradients round to nearest. Stochastic rounding and Hadamard transforms of gradients, as
in NVIDIA's recipe for pre-training, are left out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import FormatSpec, ScaleRule
from zerocast.gemm import inputs, torch_api
from zerocast.gemm.case import Case

SCALING = ["BlockWise1x16", "TensorWise"]
SWIZZLE = ["SWIZZLE_32_4_4", "NO_SWIZZLE"]


def supports(fmt: FormatSpec) -> bool:
    """Return True for formats with two levels of scales."""
    return fmt.scale_rule is ScaleRule.TWO_LEVEL


hardware = torch_api.blackwell


def unsupported_reasons(case: Case) -> Iterator[str]:
    """Yield a reason unless extents are multiples of 32."""
    yield from case.unsupported_reasons(multiple=32)


def quantize(x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
    """Return (bytes `[rows, k/2]`, swizzled E4M3 scales, decode factor f32[1] of the tensor) of an
    input or an output gradient.
    """
    data, scales, factor = inputs.nvfp4(x.reshape(-1, x.shape[-1]))
    return data, torch_api.swizzled(scales), factor


def multiply(
    operands: Sequence[Tensor], weight: Any, columnwise: bool, transposed: bool, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of quantized rows with one direction of the weight."""
    assert not transposed
    codes, scales, factor = operands
    data, _ = weight.direction(columnwise)
    a, b = codes.view(torch.float4_e2m1fn_x2), data.view(torch.float4_e2m1fn_x2).t()
    a_scale = [scales.view(torch.float8_e4m3fn), factor]
    b_scale = [
        torch_api.swizzled_scales(weight, columnwise).view(torch.float8_e4m3fn),
        inputs.decode_factor(weight.amax),
    ]
    return torch_api.scaled_mm(a, a_scale, b, b_scale, SCALING, SCALING, bias, dtype, SWIZZLE)
