"""Path per_row: grouped products of all experts of a weight, in FP8, through
`torch._scaled_grouped_mm`. A weight has one scale per tensor, an input one scale per row.

Layout (torch: aten/src/ATen/native/cuda/GroupedBlas.cpp, ScaledGroupMM.cu, GroupMMCommon.cuh): A
`[rows, k]` row-major with f32 scales `[rows]`, B `[E, k, n]` column-major in its last two
dimensions with f32 scales `[E, n]`, and the end of each expert's rows, i32[E]. Without ends A is
`[E, rows, k]`. Either copy of a weight is such a B as it is stored: nothing is copied. Rows of A
may be divided at any row. In a weight gradient, which sums over the rows of an expert, each
expert's rows must begin at a multiple of 16 and cannot be empty, so they are copied with padding.

Hopper, E4M3 on both sides, bf16 results, fewer than 1024 experts. Gradients are E4M3 for that
reason. Their scales are per row, or per feature in a weight gradient, so they need less range than
with one scale per tensor. Rows that belong to no expert are not multiplied, and their content
changes no scale.

Accumulation: fast forward, full in the backward pass, as on path per_tensor.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.formats.element import E4M3
from zerocast.formats.layout import round_up
from zerocast.gemm import inputs, per_tensor, scaling, torch_api
from zerocast.gemm.case import Case

# The number of experts from which torch's kernel raises.
TOO_MANY = 1024


def supports(fmt: FormatSpec) -> bool:
    """Return True for formats with one FP32 scale per tensor, or with codes that `upcast` turns
    into E4M3 with such a scale.
    """
    return per_tensor.supports(fmt)


hardware = torch_api.hopper


def unsupported_reasons(case: Case) -> Iterator[str]:
    """Yield a reason unless weights are E4M3, inputs bf16, extents multiples of 16, and experts not
    too many.
    """
    if case.format.element != E4M3 and not case.format.is_exact_in_fp8:
        yield f"the weight must be e4m3, it is {case.format.element.name if case.format.element else None}"
    if case.dtype is torch.float16:
        yield "results are bfloat16, not float16"
    if case.experts >= TOO_MANY:
        yield f"torch's grouped product supports fewer than {TOO_MANY} experts, the weight has {case.experts}"
    yield from case.unsupported_reasons(multiple=16)


def quantize(x: Tensor, fmt: FormatSpec, gradient: bool) -> tuple[Tensor, ...]:
    """Return (codes of the shape of `x`, scale_inv f32 of that without the last dimension)."""
    return inputs.rows(x, E4M3)


def multiply(
    operands: Sequence[Tensor], weight: Any, offs: Tensor | None, columnwise: bool, is_gradient: bool
) -> Tensor:
    """Return the product of quantized rows with one copy of the weight of all experts, in bf16.
    Only a forward product uses fast accumulation.

    `operands` are rows `[rows, k]` with `offs`, the end of each expert's rows, i32[E]; or `[E,
    rows, k]` with None.
    """
    codes, scale_inv = operands
    data, weight_scale_inv = weight.operand(columnwise)
    experts, rows, columns = weight.shape
    matrices = data.view(E4M3.dtype)
    # A columnwise copy `[columns, E * rows]` has the rows of consecutive experts next to each
    # other.
    b = (
        matrices.view(columns, experts, rows).permute(1, 2, 0)
        if columnwise
        else matrices.view(experts, rows, columns).transpose(1, 2)
    )
    # The kernel reads a scale for each column of an expert. All experts may read the same ones.
    b_scale_inv = weight_scale_inv.expand(b.shape[2]).contiguous().expand(experts, -1)
    return torch._scaled_grouped_mm(
        codes, b, scale_inv, b_scale_inv, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=not is_gradient
    )


def weight_gradient(left: Tensor, right: Tensor, offs: Tensor | None) -> Tensor:
    """Return `left.T @ right` of each expert, bf16 `[E, left features, right features]`, with full
    accumulation.

    Both are `[rows, features]` with `offs`, or `[E, rows, features]` with None. They are quantized
    with one scale per feature, for the rows of all experts.
    """
    if offs is None:
        experts, rows, _ = left.shape
        offs = torch.arange(1, experts + 1, dtype=torch.int32, device=left.device) * rows
        left, right = left.flatten(0, 1), right.flatten(0, 1)
    sources, is_row, ends = _aligned_rows(offs, left.shape[0])
    (a, a_scale_inv), (b, b_scale_inv) = (_by_feature(x, sources, is_row) for x in (left, right))
    scales = a_scale_inv.repeat(len(ends)), b_scale_inv.repeat(len(ends))
    return torch._scaled_grouped_mm(a, b.t(), *scales, offs=ends, out_dtype=torch.bfloat16)


def _aligned_rows(offs: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (row of the input or 0, whether that row belongs to an expert, the end of each expert)
    for rows that are padded so that each expert begins at a multiple of 16, with 16 rows for an
    expert without rows.

    Their number depends only on `rows` and the number of experts, so the CPU does not wait for the
    device.
    """
    counts = offs.diff(prepend=offs.new_zeros(1))
    room = ((counts + scaling.ROWS - 1) // scaling.ROWS * scaling.ROWS).clamp(min=scaling.ROWS)
    ends = room.cumsum(0, dtype=torch.int32)
    size = round_up(rows, scaling.ROWS) + scaling.ROWS * len(offs)
    places = torch.arange(size, dtype=torch.int32, device=offs.device)
    # Indices after the last expert become indices after its last row.
    experts = torch.searchsorted(ends, places, right=True).clamp(max=len(offs) - 1)
    within = places - (ends - room)[experts]
    is_row = within < counts[experts]
    return torch.where(is_row, (offs - counts)[experts] + within, 0), is_row, ends


def _by_feature(x: Tensor, sources: Tensor, is_row: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes `[features, len(sources)]`, scale_inv f32 `[features]`) of these rows of `x`,
    with zeros where `is_row` is False.
    """
    rows = x.index_select(0, sources).masked_fill_(~is_row[:, None], 0)
    amax = torch.linalg.vector_norm(rows, torch.inf, dim=0, dtype=torch.float32)
    scale = scaling.encode_scale(amax, E4M3.max, power_of_2=False)
    return scaling.turned(scaling.codes_of(rows, scale, E4M3)), scaling.reciprocal(scale)
