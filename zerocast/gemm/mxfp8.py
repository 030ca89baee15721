"""Path mxfp8: E4M3 with a power-of-two scale for 32 elements along the inner dimension, on both
sides.

NEVER RUN: written from torch's documented interface, no Blackwell GPU was at hand. The choice, the
bytes of the input, the swizzle and the operands that the call is handed are tested on any machine.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_mxfp8_mxfp8`): A `[rows, k]`, B
`[k, n]`; E8M0 scales of `[rup(rows, 128), rup(k/32, 4)]` and `[rup(n, 128), rup(k/32, 4)]`,
swizzled (torch_api.py), contiguous. In the forward pass B is the rowwise data read as its
transpose. In the backward pass it is the columnwise data as stored, `[M, K]` row-major. Its blocks
run down the columns, so a transpose of the rowwise codes would not give it. Data-centre Blackwell
(10.x) reads B in either order. GeForce cards (12.x) read only the first (pytorch/pytorch#198126),
so they are left out. Gradients are E4M3, as everything in this format.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import FormatSpec, ScaleRule
from zerocast.formats.element import E4M3
from zerocast.gemm import inputs, torch_api
from zerocast.gemm.case import Case


def supports(fmt: FormatSpec) -> bool:
    """Return True for E4M3 codes with E8M0 block scales."""
    return fmt.scale_rule is ScaleRule.E8M0 and fmt.element is E4M3


hardware = torch_api.blackwell


def unsupported_reasons(case: Case) -> Iterator[str]:
    """Yield a reason unless extents are multiples of 32."""
    yield from case.unsupported_reasons(multiple=32)


def quantize(x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
    """Return (codes `[rows, k]`, swizzled E8M0 scales) of an input or an output gradient."""
    codes, scales = inputs.mxfp8(x.reshape(-1, x.shape[-1]))
    return codes, torch_api.swizzled(scales).view(torch.float8_e8m0fnu)


def multiply(
    operands: Sequence[Tensor], weight: Any, columnwise: bool, transposed: bool, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of quantized rows with one direction of the weight."""
    assert not transposed
    codes, scale_inv = operands
    data, _ = weight.direction(columnwise)
    # Both copies are stored as [M, K]. B is `[k, n]`: W for the input gradient, W.T forward.
    b = data.view(torch.float8_e4m3fn) if columnwise else data.view(torch.float8_e4m3fn).t()
    b_scale_inv = torch_api.swizzled_scales(weight, columnwise).view(torch.float8_e8m0fnu)
    scaling = ["BlockWise1x32"]
    return torch_api.scaled_mm(codes, scale_inv, b, b_scale_inv, scaling, scaling, bias, dtype, ["SWIZZLE_32_4_4"])
