"""Path nvfp4: E2M1 with an E4M3 scale for 16 elements along the inner dimension and an FP32 factor a tensor, on both sides.

NEVER RUN: written from torch's documented interface, no Blackwell GPU was at hand. The choice, the bytes of the input, the
swizzle and the operands that the call is handed are tested on any machine.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_nvfp4_nvfp4`): A `[rows, k/2]` bytes, B `[k/2, n]` bytes
column-major, the even element in the low nibble; E4M3 scales of `[rup(rows, 128), rup(k/16, 4)]` and `[rup(n, 128), rup(k/16, 4)]`,
swizzled (swizzle.py), contiguous; one f32 factor each, whose product the result is multiplied by. 16 bytes of k, so 32 elements.

Inputs and gradients round to nearest. Stochastic rounding and Hadamard transforms of gradients, as in NVIDIA's recipe for
pre-training, are left out.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import FormatSpec, ScaleRule
from zerocast.gemm import inputs, torch_api
from zerocast.gemm.case import Case
from zerocast.gemm.rows import over_rows
from zerocast.gemm.swizzle import of_weight, swizzle

SCALING = ["BlockWise1x16", "TensorWise"]
SWIZZLE = ["SWIZZLE_32_4_4", "NO_SWIZZLE"]


def takes(fmt: FormatSpec) -> bool:
    """Two-level scales."""
    return fmt.scale_rule is ScaleRule.TWO_LEVEL


def obstacles(case: Case) -> Iterator[str]:
    """Data-centre Blackwell GPUs, and a torch with a dtype for E2M1."""
    yield from torch_api.obstacles(case, major=10, name="Blackwell")
    if not hasattr(torch, "float4_e2m1fn_x2"):
        yield "this torch has no torch.float4_e2m1fn_x2"
    yield from case.obstacles(multiple=32)


def forward(x: Tensor, weight: Any, bias: Tensor | None, transposed: bool) -> Tensor:
    """`x @ W.T + bias` from the rowwise copy."""
    assert not transposed
    return _product(x, weight, False, bias)


def input_gradient(grad: Tensor, weight: Any, transposed: bool) -> Tensor:
    """`grad @ W` from the columnwise copy."""
    assert not transposed
    return _product(grad, weight, True, None)


def _product(x: Tensor, weight: Any, columnwise: bool, bias: Tensor | None) -> Tensor:
    data, _ = weight.direction(columnwise)
    b = data.view(torch.float4_e2m1fn_x2).t()
    b_scale = [of_weight(weight, columnwise).view(torch.float8_e4m3fn), inputs.decode_factor(weight.amax)]

    def product(rows: Tensor) -> Tensor:
        a, scales, factor = inputs.nvfp4(rows)
        a_scale = [swizzle(scales).view(torch.float8_e4m3fn), factor]
        a = a.view(torch.float4_e2m1fn_x2)
        return torch_api.scaled_mm(a, a_scale, b, b_scale, SCALING, SCALING, bias, x.dtype, SWIZZLE)

    return over_rows(product, x, data.shape[0])
