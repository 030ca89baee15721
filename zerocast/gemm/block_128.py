"""Path block_128: FP8 weights with one scale per 128x128 block, inputs with one scale per 128
elements of a row.

Layout (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_block1x128_block128x128`; cuBLAS,
"Scaling factors layouts"): A `[rows, k]` row-major with f32 scales `[rows, k/128]` of strides
`[1, rows]`; B `[k, n]` column-major with f32 scales `[L4, n/128]` of strides `[1, L4]`, L4 = k/128
rounded up to a multiple of 4. That is the scale buffer of docs/formats/common.md, `[n/128, L4]`,
read as its transpose: nothing is copied. Only the call that names its scaling checks L4;
`torch._scaled_mm` takes unpadded scales and then gives wrong numbers (pytorch/pytorch#166752), so
it is not used here.

Hopper only, with cuBLAS 12.9 or later. This scaling has no fast accumulation. Rows are padded to a
multiple of 16; both extents of the weight must be multiples of 128. Inputs and gradients are E4M3,
as is usual with blocks this small (TransformerEngine, "FP8 Blockwise Scaling"; DeepSeek-V3). Their
scales are powers of two if the weight's scales are.

The stage `upcast` turns the codes of mxfp4 and of nvfp4:exact_in_fp8 into such a weight without
rounding, for the duration of one product. In memory the weight stays at 4 bits per element. All
blocks of the second have one scale, the tensor's, so it can be multiplied by path per_tensor as
well.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import FormatSpec, ScaleRule
from zerocast.formats.element import E4M3
from zerocast.formats.layout import round_up
from zerocast.gemm import inputs, scaling, torch_api
from zerocast.gemm.case import Case

BLOCK = 128
BLOCK_SHAPE = (BLOCK, BLOCK)
# The scales of a block row are padded to a multiple of this, L4 above.
SCALE_COLUMNS = 4
FIRST_CUDA = (12, 9)


def supports(fmt: FormatSpec) -> bool:
    """Return True for FP32 scales in 128x128 blocks, or for codes that `upcast` turns into E4M3
    with such scales, or with one scale for all blocks.
    """
    has_blocks = BLOCK_SHAPE in (fmt.block if fmt.scale_rule is ScaleRule.FP32 else None, fmt.scale_group)
    return has_blocks or fmt.exact_scales


hardware = torch_api.hopper


def unsupported_reasons(case: Case) -> Iterator[str]:
    """Yield a reason unless CUDA is recent, the weights are E4M3, and all blocks are complete."""
    if case.cuda is not None and case.cuda < FIRST_CUDA:
        yield f"cuBLAS multiplies 128x128 blocks from CUDA 12.9 on, torch was built with {'.'.join(map(str, case.cuda))}"
    if case.format.element != E4M3 and not case.format.is_exact_in_fp8:
        yield f"the weight must be e4m3, it is {case.format.element.name if case.format.element else None}"
    yield from case.unsupported_reasons(multiple=BLOCK)


def _has_power_of_2_scales(fmt: FormatSpec) -> bool:
    return fmt.power_of_2_scale or fmt.scale_group is not None


def quantize(x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
    """Return (codes `[rows, k]`, scale_inv f32 `[rows, k / 128]` column by column); rows are padded
    with zeros to a multiple of 16.
    """
    rows = scaling.padded(x.reshape(-1, x.shape[-1]), scaling.ROWS)
    codes, scale_inv = inputs.groups(rows, BLOCK, E4M3, _has_power_of_2_scales(fmt))
    # cuBLAS reads the scales with strides [1, rows]. The kernels write them so, and then
    # contiguous() copies nothing; the plain operations write them row by row.
    return codes, scale_inv.t().contiguous().t()


def quantize_both_ways(
    x: Tensor, fmt: FormatSpec, gradient: bool, is_square: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the result of `quantize`, and the operand of the weight gradient, which sums over
    tokens.

    The second has one scale per 128 tokens of a feature: codes `[k, tokens]` and scale_inv f32
    `[k, tokens / 128]` column by column. If `is_square` it has one scale per 128x128 block, and
    scale_inv is `[L4, k / 128]`. Tokens are padded with zeros to a multiple of 16.
    """
    rows = x.reshape(-1, x.shape[-1])
    codes, scale_inv, *turned = inputs.groups_both_ways(rows, BLOCK, E4M3, _has_power_of_2_scales(fmt), is_square)
    return (codes, scale_inv), tuple(turned)


def weight_gradient(grad: Sequence[Tensor], x: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return `grad.T @ x` as `dtype`, from the second results of `quantize_both_ways` for both."""
    (grad_codes, grad_scale_inv), (x_codes, x_scale_inv) = grad, x
    # The setting may have changed since the forward pass, so the shape of the scales shows whether
    # the input was quantized in groups or in square blocks.
    in_groups = x_scale_inv.shape == (x_codes.shape[0], -(-x_codes.shape[1] // BLOCK))
    x_scaling = "BlockWise1x128" if in_groups else "BlockWise128x128"
    return torch_api.scaled_mm(
        grad_codes, grad_scale_inv, x_codes.t(), x_scale_inv, ["BlockWise1x128"], [x_scaling], None, dtype
    )


def multiply(
    operands: Sequence[Tensor], weight: Any, columnwise: bool, transposed: bool, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of quantized rows with one direction of the weight. The result includes
    the rows of the padding.
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
    assert weight_scale_inv is not None, fmt
    if fmt.exact_scales:
        blocks = data.shape[0] // BLOCK, round_up(data.shape[1] // BLOCK, SCALE_COLUMNS)
        weight_scale_inv = weight_scale_inv.expand(blocks).contiguous()
    b, b_scale_inv = data.view(torch.float8_e4m3fn).t(), weight_scale_inv.t()
    return torch_api.scaled_mm(codes, scale_inv, b, b_scale_inv, ["BlockWise1x128"], ["BlockWise128x128"], bias, dtype)
