"""Path per_tensor: FP8 weights with one scale a tensor, through `torch._scaled_mm`.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_mm_out_cuda`): A `[rows, k]`
row-major, B `[k, n]` column-major, which is the other copy of the weight read as its transpose; k
and n multiples of 16, rows free; both scales one f32 with which codes are decoded; not two E5M2
operands. The bias, of the result's dtype, is added before the result is rounded.

Elements: inputs are E4M3. Gradients are E5M2, whose range they need more than its precision
("hybrid", NVIDIA's FP8 primer in the user guide of TransformerEngine), except beside E5M2 weights,
where the tensor cores want E4M3.

Accumulation: fast (about 14 bits on Hopper) forward, full in the backward pass, the setting of
TransformerEngine (`pytorch/module/base.py`: `_2X_ACC_FPROP = False`, `_2X_ACC_DGRAD = True`).
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
    """FP32 scales, one a tensor: current and delayed scaling."""
    return fmt.scale_rule is ScaleRule.FP32 and fmt.block is None


def hardware(case: Case) -> Iterator[str]:
    """Any NVIDIA GPU with FP8 tensor cores; torch's own emulation on the CPU."""
    on_cpu = case.device == "cpu" and torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")
    if case.capability is None and not on_cpu:
        yield f"torch._scaled_mm is for NVIDIA GPUs here, not for {case.device} tensors"
    elif case.capability and case.capability < FIRST_CAPABILITY:
        yield f"FP8 tensor cores come with compute capability 8.9, this device has {case.capability_text}"


def unsupported_reasons(case: Case) -> Iterator[str]:
    """Extents in multiples of 16."""
    yield from case.unsupported_reasons(multiple=16)


def quantize(x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
    """(codes `[rows, k]`, scale_inv f32[1]) of an input or an output gradient."""
    return inputs.per_tensor(x.reshape(-1, x.shape[-1]), _element(fmt, gradient))


def _element(fmt: FormatSpec, gradient: bool) -> Element:
    return E5M2 if gradient and fmt.element != E5M2 else E4M3


def quantize_both_ways(
    x: Tensor, fmt: FormatSpec, gradient: bool, is_square: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The result of `quantize`, and for the weight gradient, which sums over tokens, the same codes
    as `[k, tokens]`, padded with zeros to a multiple of 16.
    """
    if scaling.is_traced(x) and not gradient:
        # plain operations, which the backward pass of a graph repeats: their codes need not be kept
        codes, scale_inv = quantize(x, fmt, gradient)
        return (codes, scale_inv), (scaling.turned(codes), scale_inv)
    rows = x.reshape(-1, x.shape[-1])
    codes, scale_inv, turned = inputs.per_tensor_both_ways(rows, _element(fmt, gradient))
    return (codes, scale_inv), (turned, scale_inv)


def weight_gradient(grad: Sequence[Tensor], x: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`grad.T @ x`, accumulated in full, from what
    `quantize_both_ways` gave for both.
    """
    (left, left_scale_inv), (right, right_scale_inv) = grad, x
    return torch._scaled_mm(left, right.t(), left_scale_inv, right_scale_inv, out_dtype=dtype)


def multiply(
    operands: Sequence[Tensor], weight: Any, columnwise: bool, transposed: bool, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of quantized rows with one direction of the weight; accumulates fast in the
    forward pass alone.
    """
    assert not transposed
    return multiply_codes(operands, weight.direction(columnwise), weight.format, columnwise, bias, dtype)


def multiply_codes(
    operands: Sequence[Tensor],
    weight: tuple[Tensor, Tensor | None],
    fmt: FormatSpec,
    columnwise: bool,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`multiply` with (codes, scale_inv) of that direction."""
    (codes, scale_inv), (data, weight_scale_inv) = operands, weight
    assert fmt.element and weight_scale_inv is not None, fmt
    return torch._scaled_mm(
        codes,
        data.view(fmt.element.dtype).t(),
        scale_inv,
        weight_scale_inv,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=not columnwise,
    )
