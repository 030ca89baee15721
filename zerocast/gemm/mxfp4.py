"""Path mxfp4: E2M1 with a power-of-two scale for 32 elements along the inner dimension, on both
sides.

NEVER RUN: written from torch's documented interface, no Blackwell GPU was at hand. The choice, the
bytes of the input, the swizzle and the operands that the call is handed are tested on any machine.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_mxfp4_mxfp4`): A `[rows, k/2]`
bytes, B `[k/2, n]` bytes column-major, the even element in the low nibble; E8M0 scales of
`[rup(rows, 128), rup(k/32, 4)]` and `[rup(n, 128), rup(k/32, 4)]`, swizzled (torch_api.py),
contiguous. The kernel is FBGEMM's (MSLK's from torch 2.12 on), which a build may lack; its results
are bf16, and it leaves a bias out, so the bias is added here.

Inputs and gradients round to nearest with scales rounded up. Hopper has no such product: there
block_128 multiplies the same weight in FP8.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import FormatSpec, ScaleRule
from zerocast.formats.element import E2M1
from zerocast.gemm import inputs, torch_api
from zerocast.gemm.case import Case

SCALING = ["BlockWise1x32"]
# Options of torch's build. The product needs one of the two.
KERNELS = ("USE_FBGEMM_GENAI", "USE_MSLK")


def supports(fmt: FormatSpec) -> bool:
    """Return True for E2M1 codes with E8M0 block scales."""
    return fmt.scale_rule is ScaleRule.E8M0 and fmt.element == E2M1


hardware = torch_api.blackwell


@functools.cache
def _has_kernel() -> bool:
    return any(name in torch.__config__.show() for name in KERNELS)


def unsupported_reasons(case: Case) -> Iterator[str]:
    """Yield a reason unless torch has the kernel, extents are multiples of 32, and inputs are
    bf16.
    """
    if not _has_kernel():
        yield f"this torch was built without {' and '.join(KERNELS)}, one of which has the product"
    if case.dtype is torch.float16:
        yield "results are bfloat16, not float16"
    yield from case.unsupported_reasons(multiple=32)


def quantize(x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
    """Return (bytes `[rows, k/2]`, swizzled E8M0 scales) of an input or an output gradient."""
    data, scales = inputs.mxfp4(x.reshape(-1, x.shape[-1]))
    return data, torch_api.swizzled(scales)


def multiply(
    operands: Sequence[Tensor], weight: Any, columnwise: bool, transposed: bool, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of quantized rows with one direction of the weight."""
    assert not transposed
    codes, scales = operands
    data, _ = weight.direction(columnwise)
    a, b = codes.view(torch.float4_e2m1fn_x2), data.view(torch.float4_e2m1fn_x2).t()
    a_scale, b_scale = (s.view(torch.float8_e8m0fnu) for s in (scales, torch_api.swizzled_scales(weight, columnwise)))
    # The kernel ignores a bias, so none is passed and it is added afterwards.
    y = torch_api.scaled_mm(a, a_scale, b, b_scale, SCALING, SCALING, None, dtype, ["SWIZZLE_32_4_4"])
    return y if bias is None else y + bias
