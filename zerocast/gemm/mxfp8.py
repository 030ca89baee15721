"""Path mxfp8: E4M3 with a power-of-two scale for 32 elements along the inner dimension, on both sides.

NEVER RUN: written from torch's documented interface, no Blackwell GPU was at hand. The choice, the bytes of the input, the
swizzle and the operands that the call is handed are tested on any machine.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_mxfp8_mxfp8`): A `[rows, k]`, B `[k, n]`; E8M0 scales of
`[rup(rows, 128), rup(k/32, 4)]` and `[rup(n, 128), rup(k/32, 4)]`, swizzled (swizzle.py), contiguous. B is the rowwise data read
as its transpose forward. In the backward pass it is the columnwise data as it lies, `[M, K]` row-major: its blocks run down the
columns, so turning it is not a transpose of codes. Blackwell reads B in either order, GeForce cards (12.x) only in the
first (pytorch/pytorch#198126), hence 10.x alone. Gradients are E4M3 like everything in this format.
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


def takes(fmt: FormatSpec) -> bool:
    """E8M0 scales."""
    return fmt.scale_rule is ScaleRule.E8M0


def obstacles(case: Case) -> Iterator[str]:
    """Data-centre Blackwell GPUs."""
    yield from torch_api.obstacles(case, major=10, name="Blackwell")
    yield from case.obstacles(multiple=32)


def forward(x: Tensor, weight: Any, bias: Tensor | None, transposed: bool) -> Tensor:
    """`x @ W.T + bias` from the rowwise copy."""
    assert not transposed
    data, _ = weight.direction(columnwise=False)
    return _product(x, data.view(torch.float8_e4m3fn).t(), of_weight(weight, columnwise=False), bias)


def input_gradient(grad: Tensor, weight: Any, transposed: bool) -> Tensor:
    """`grad @ W` from the columnwise copy."""
    assert not transposed
    data, _ = weight.direction(columnwise=True)
    return _product(grad, data.view(torch.float8_e4m3fn), of_weight(weight, columnwise=True), None)


def _product(x: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    def product(rows: Tensor) -> Tensor:
        codes, scales = inputs.mxfp8(rows)
        a_scale = swizzle(scales).view(torch.float8_e8m0fnu)
        how = ["BlockWise1x32"]
        return torch_api.scaled_mm(
            codes, a_scale, b, b_scale.view(torch.float8_e8m0fnu), how, how, bias, x.dtype, ["SWIZZLE_32_4_4"]
        )

    return over_rows(product, x, b.shape[1])
