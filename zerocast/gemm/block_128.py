"""Path block_128: FP8 weights with a scale a 128x128 block, inputs with a scale for 128 elements of
a row.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_block1x128_block128x128`; cuBLAS,
"Scaling factors layouts"): A `[rows, k]` row-major with f32 scales `[rows, k/128]` of strides
`[1, rows]`; B `[k, n]` column-major with f32 scales `[L4, n/128]` of strides `[1, L4]`, L4 = k/128
rounded up to a multiple of 4. That is the scale buffer of docs/formats/common.md, `[n/128, L4]`,
read as its transpose: nothing is copied. Only the call that names its scaling checks L4;
`torch._scaled_mm` takes unpadded scales and then gives wrong numbers (pytorch/pytorch#166752), so
it is not used here.

Hopper only, with cuBLAS 12.9 or later; no fast accumulation, which this scaling does not know. Rows
are padded to a multiple of 16, both extents of the weight must be multiples of 128. Inputs and
gradients are E4M3, as is usual with blocks this small (TransformerEngine, "FP8 Blockwise Scaling";
DeepSeek-V3), their scales powers of two where those of the weight are.

The codes of mxfp4 become such a weight without rounding (stage upcast), for the one product that
reads it: the weight stays 4 bits an element in memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import FormatSpec, ScaleRule
from zerocast.formats.element import E4M3
from zerocast.gemm import inputs, scaling, torch_api
from zerocast.gemm.case import Case

BLOCK = 128
BLOCK_SHAPE = (BLOCK, BLOCK)
FIRST_CUDA = (12, 9)


def supports(fmt: FormatSpec) -> bool:
    """FP32 scales in 128x128 blocks, or codes that become E4M3 ones with such scales."""
    return BLOCK_SHAPE in (fmt.block if fmt.scale_rule is ScaleRule.FP32 else None, fmt.scale_group)


def hardware(case: Case) -> Iterator[str]:
    """The GPUs that have this product: Hopper."""
    yield from torch_api.hardware(case, major=9, name="Hopper")


def unsupported_reasons(case: Case) -> Iterator[str]:
    """A recent CUDA, E4M3 weights, whole blocks."""
    yield from torch_api.unsupported_reasons()
    if case.cuda is not None and case.cuda < FIRST_CUDA:
        yield f"cuBLAS multiplies 128x128 blocks from CUDA 12.9 on, torch was built with {'.'.join(map(str, case.cuda))}"
    if case.format.element != E4M3 and not case.format.is_exact_in_fp8:
        yield f"the weight must be e4m3, it is {case.format.element.name if case.format.element else None}"
    yield from case.unsupported_reasons(multiple=BLOCK)


def _has_power_of_2_scales(fmt: FormatSpec) -> bool:
    return fmt.power_of_2_scale or fmt.is_exact_in_fp8


def quantize(x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
    """(codes `[rows, k]`, scale_inv f32 `[rows, k / 128]` column by column); rows are padded
    with zeros to a multiple of 16.
    """
    rows = scaling.padded(x.reshape(-1, x.shape[-1]), scaling.ROWS)
    codes, scale_inv = inputs.groups(rows, BLOCK, E4M3, _has_power_of_2_scales(fmt))
    return codes, scale_inv.t().contiguous().t()


def quantize_both_ways(
    x: Tensor, fmt: FormatSpec, gradient: bool, is_square: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The result of `quantize`, and for the weight gradient, which sums over tokens, groups of
    128 tokens; if `is_square`, blocks of 128x128.

    These are (codes `[k, tokens]`, scale_inv f32 `[k, tokens / 128]` column by column, or
    `[L4, k / 128]`), padded with zeros alike.
    """
    rows = x.reshape(-1, x.shape[-1])
    codes, scale_inv, *turned = inputs.groups_both_ways(rows, BLOCK, E4M3, _has_power_of_2_scales(fmt), is_square)
    return (codes, scale_inv), tuple(turned)


def weight_gradient(grad: Sequence[Tensor], x: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`grad.T @ x` from what `quantize_both_ways` gave for both."""
    (left, left_scale_inv), (right, right_scale_inv) = grad, x
    in_groups = right_scale_inv.shape == (right.shape[0], -(-right.shape[1] // BLOCK))
    of_x = "BlockWise1x128" if in_groups else "BlockWise128x128"
    return torch_api.scaled_mm(
        left, left_scale_inv, right.t(), right_scale_inv, ["BlockWise1x128"], [of_x], None, dtype
    )


def multiply(
    operands: Sequence[Tensor], weight: Any, columnwise: bool, transposed: bool, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of quantized rows with one direction of the weight, the rows of the padding
    included.
    """
    assert not transposed
    codes, scale_inv = operands
    read = weight.upcast if weight.format.is_exact_in_fp8 else weight.direction
    data, weight_scale_inv = read(columnwise)
    b, b_scale_inv = data.view(torch.float8_e4m3fn).t(), weight_scale_inv.t()
    return torch_api.scaled_mm(codes, scale_inv, b, b_scale_inv, ["BlockWise1x128"], ["BlockWise128x128"], bias, dtype)
