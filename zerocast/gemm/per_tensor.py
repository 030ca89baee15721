"""Path per_tensor: FP8 weights with one scale a tensor, through `torch._scaled_mm`.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_mm_out_cuda`): A `[rows, k]` row-major, B `[k, n]`
column-major, which is the other copy of the weight read as its transpose; k and n multiples of 16, rows free; both scales one f32
with which codes are decoded; not two E5M2 operands. The bias, of the result's dtype, is added before the result is rounded.

Elements: inputs are E4M3. Gradients are E5M2, whose range they need more than its precision ("hybrid", NVIDIA's FP8 primer in the
user guide of TransformerEngine), except beside E5M2 weights, where the tensor cores want E4M3.

Accumulation: fast (about 14 bits on Hopper) forward, full in the backward pass, the setting of TransformerEngine
(`pytorch/module/base.py`: `_2X_ACC_FPROP = False`, `_2X_ACC_DGRAD = True`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import Element, FormatSpec, ScaleRule
from zerocast.formats.element import E4M3, E5M2
from zerocast.gemm import inputs
from zerocast.gemm.case import Case
from zerocast.gemm.rows import over_rows

FIRST_CAPABILITY = (8, 9)


def takes(fmt: FormatSpec) -> bool:
    """FP32 scales, one a tensor: current and delayed scaling."""
    return fmt.scale_rule is ScaleRule.FP32 and fmt.block is None


def obstacles(case: Case) -> Iterator[str]:
    """Any NVIDIA GPU with FP8 tensor cores; torch's own emulation on the CPU."""
    on_cpu = case.device == "cpu" and torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")
    if case.capability is None and not on_cpu:
        yield f"torch._scaled_mm is for NVIDIA GPUs here, not for {case.device} tensors"
    elif case.capability and case.capability < FIRST_CAPABILITY:
        yield f"FP8 tensor cores come with compute capability 8.9, this device has {case.capability_text}"
    yield from case.obstacles(multiple=16)


def forward(x: Tensor, weight: Any, bias: Tensor | None, transposed: bool) -> Tensor:
    """`x @ W.T + bias` from the rowwise copy."""
    assert not transposed
    return _product(x, E4M3, weight, weight.direction(columnwise=False), bias)


def input_gradient(grad: Tensor, weight: Any, transposed: bool) -> Tensor:
    """`grad @ W` from the columnwise copy."""
    assert not transposed
    element = E4M3 if weight.format.element == E5M2 else E5M2
    return _product(grad, element, weight, weight.direction(columnwise=True), None, fast=False)


def _product(
    x: Tensor, element: Element, weight: Any, stored: tuple[Tensor, Tensor], bias: Tensor | None, fast: bool = True
) -> Tensor:
    data, scale_inv = stored
    b = data.view(weight.format.element.dtype).t()

    def product(rows: Tensor) -> Tensor:
        a, a_scale = inputs.per_tensor(rows, element)
        return torch._scaled_mm(a, b, a_scale, scale_inv, bias=bias, out_dtype=x.dtype, use_fast_accum=fast)

    return over_rows(product, x, data.shape[0])
