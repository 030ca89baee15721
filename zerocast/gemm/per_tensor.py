"""Path per_tensor: FP8 weights with one scale per tensor, through `torch._scaled_mm`.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_mm_out_cuda`): A `[rows, k]`
row-major, B `[k, n]` column-major, which is one copy of the weight read as its transpose. k and n
are multiples of 16, rows any number. Each scale is one f32 decode scale. Not both operands may be
E5M2. The bias has the result's dtype and is added before the result is rounded.

Elements: inputs are E4M3. Gradients are E5M2, since they need range more than precision ("hybrid",
NVIDIA's FP8 primer in the user guide of TransformerEngine). With E5M2 weights they are E4M3, since
the tensor cores do not multiply E5M2 with E5M2.

Accumulation: fast (about 14 bits on Hopper) forward, full in the backward pass, the setting of
TransformerEngine (`pytorch/module/base.py`: `_2X_ACC_FPROP = False`, `_2X_ACC_DGRAD = True`).

The stage `upcast` turns the codes of nvfp4:exact_in_fp8 into such a weight without rounding, for
the duration of one product. In memory the weight stays at 4 bits per element.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import Element, FormatSpec, ScaleRule
from zerocast.formats.element import E4M3, E5M2
from zerocast.gemm import inputs, scaling
from zerocast.gemm.case import Case

FIRST_CAPABILITY = (8, 9)


def supports(fmt: FormatSpec) -> bool:
    """Return True for formats with one FP32 scale per tensor (current and delayed scaling), and for
    codes that `upcast` turns into E4M3 with such a scale.
    """
    return fmt.exact_scales or (fmt.scale_rule is ScaleRule.FP32 and fmt.block is None)


def hardware(case: Case) -> Iterator[str]:
    """Yield a reason unless the device is an NVIDIA GPU with FP8 tensor cores, or the CPU, where
    torch emulates them.
    """
    on_cpu = case.device == "cpu" and torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")
    if case.capability is None and not on_cpu:
        yield f"torch._scaled_mm needs an NVIDIA GPU in this torch, got {case.device} tensors"
    elif case.capability and case.capability < FIRST_CAPABILITY:
        yield f"FP8 tensor cores come with compute capability 8.9, this device has {case.capability_text}"


def unsupported_reasons(case: Case) -> Iterator[str]:
    """Yield a reason unless extents are multiples of 16."""
    yield from case.unsupported_reasons(multiple=16)


def quantize(x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
    """Return (codes `[rows, k]`, scale_inv f32[1]) of an input or an output gradient."""
    return inputs.per_tensor(x.reshape(-1, x.shape[-1]), _element(fmt, gradient))


def _element(fmt: FormatSpec, gradient: bool) -> Element:
    """Return the element of an input or of an output gradient; the module docstring says why."""
    return E5M2 if gradient and fmt.element != E5M2 else E4M3


def quantize_both_ways(
    x: Tensor, fmt: FormatSpec, gradient: bool, is_square: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the result of `quantize`, and the operand of the weight gradient, which sums over
    tokens: the same codes as `[k, tokens]`, with tokens padded with zeros to a multiple of 16.
    """
    rows = x.reshape(-1, x.shape[-1])
    if scaling.is_traced(x) and not gradient:
        codes, scale_inv, turned = inputs.per_tensor_recomputed(rows, _element(fmt, gradient))
        return (codes, scale_inv), (turned, scale_inv)
    codes, scale_inv, turned = inputs.per_tensor_both_ways(rows, _element(fmt, gradient))
    return (codes, scale_inv), (turned, scale_inv)


def weight_gradient(grad: Sequence[Tensor], x: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return `grad.T @ x` as `dtype` with full accumulation, from the second results of
    `quantize_both_ways` for both.
    """
    (grad_codes, grad_scale_inv), (x_codes, x_scale_inv) = grad, x
    return torch._scaled_mm(grad_codes, x_codes.t(), grad_scale_inv, x_scale_inv, out_dtype=dtype)


def multiply(
    operands: Sequence[Tensor], weight: Any, columnwise: bool, transposed: bool, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of quantized rows with one direction of the weight. Only the forward
    product uses fast accumulation.
    """
    assert not transposed
    return multiply_codes(operands, weight.operand(columnwise), weight.format, columnwise, bias, dtype)


def multiply_codes(
    operands: Sequence[Tensor],
    weight: tuple[Tensor, Tensor | None],
    fmt: FormatSpec,
    columnwise: bool,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the result of `multiply` with (codes, scale_inv) of the direction as `weight`."""
    (codes, scale_inv), (data, weight_scale_inv) = operands, weight
    assert fmt.element and weight_scale_inv is not None, fmt
    element = E4M3 if fmt.is_exact_in_fp8 else fmt.element
    # `data` is `[n, k]` row-major, in either copy. Its transpose is B, column-major as required.
    return torch._scaled_mm(
        codes,
        data.view(element.dtype).t(),
        scale_inv,
        weight_scale_inv,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=not columnwise,
    )
