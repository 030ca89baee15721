"""torch.nn.functional.scaled_mm as its documentation has it, in FP32 on any device: what the paths hand over must multiply to the
right numbers. Layouts are asserted; the swizzled order is the formula of cuBLAS's documentation, written out here once more.
So is `torch._scaled_grouped_mm`, with what its sources check on the host and on the GPU (GroupedBlas.cpp, GroupMMCommon.cuh).
"""

from typing import Any

import torch
from torch import Tensor

from zerocast.backends.reference.codec import decode_e2m1, decode_e4m3, decode_e8m0

BF16 = torch.bfloat16


def place(i: int, j: int, columns: int) -> int:
    """Return the index at which cuBLAS looks for scale (i, j) of a buffer with so many columns."""
    return ((i // 128) * (columns // 4) + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


def places(rows: int, columns: int) -> Tensor:
    """Return the `place` of every scale of a matrix."""
    return torch.tensor([[place(i, j, columns) for j in range(columns)] for i in range(rows)])


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def _swizzled(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """Return the bytes `[rows, blocks]` of swizzled scales."""
    padded = _round_up(rows, 128), _round_up(blocks, 4)
    assert scales.dim() == 1 and scales.is_contiguous() and scales.numel() == padded[0] * padded[1]
    return scales.view(torch.uint8)[places(*padded)][:rows, :blocks]


def _columns(scale: Tensor) -> bool:
    """Return whether `scale` is column-major without gaps. Torch takes either stride of a single column."""
    return scale.stride() == (1, scale.shape[0]) or (scale.shape[1] == 1 and scale.stride() == (1, 1))


def _values(codes: Tensor) -> Tensor:
    if codes.dtype is torch.float4_e2m1fn_x2:
        data = codes.contiguous().view(torch.uint8)
        return decode_e2m1(torch.stack((data & 15, data >> 4), -1).flatten(1))
    return codes.float()


def decoded(codes: Tensor, scale: Any, scaling: list[str], swizzle: list[str], second: bool) -> Tensor:
    """Decode an operand `[outer, inner]` to FP32 by the layout of its scales. `second` is the right-hand operand."""
    value = _values(codes)
    outer, inner = value.shape
    match scaling:
        case ["BlockWise1x128"]:
            assert outer % 16 == 0 and inner % 16 == 0 and scale.shape == (outer, -(-inner // 128)) and _columns(scale)
            factor = scale.repeat_interleave(128, 1)[:, :inner]
        case ["BlockWise128x128"]:
            padded = _round_up(-(-inner // 128), 4)
            assert second and scale.shape == (padded, outer // 128) and _columns(scale)
            factor = scale.t().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :inner]
        case ["BlockWise1x32"]:
            assert swizzle == ["SWIZZLE_32_4_4"] and scale.dtype is torch.float8_e8m0fnu
            factor = decode_e8m0(_swizzled(scale, outer, inner // 32)).repeat_interleave(32, 1)
        case ["BlockWise1x16", "TensorWise"]:
            assert swizzle == ["SWIZZLE_32_4_4", "NO_SWIZZLE"]
            assert scale[0].dtype is torch.float8_e4m3fn and scale[1].numel() == 1
            factor = decode_e4m3(_swizzled(scale[0], outer, inner // 16)).repeat_interleave(16, 1) * scale[1]
        case _:
            raise AssertionError(f"no such scaling: {scaling}")
    return value * factor


def emulated(
    a: Tensor,
    a_scale: Any,
    b: Tensor,
    b_scale: Any,
    a_scaling: list[str],
    b_scaling: list[str],
    bias: Tensor | None,
    dtype: torch.dtype,
    swizzle: Any = (),
) -> Tensor:
    """Emulate `zerocast.gemm.torch_api.scaled_mm` by the product of decoded operands."""
    assert a.is_contiguous()
    left = decoded(a, a_scale, a_scaling, list(swizzle), second=False)
    right = decoded(b.t(), b_scale, b_scaling, list(swizzle), second=True)
    y = left @ right.t()
    return (y if bias is None else y + bias.float()).to(dtype)


def _is_row_major(matrix: Tensor, rows: int, columns: int) -> bool:
    """Return whether the dimension `columns` has no gaps, and each row begins where a load of 16 bytes can."""
    stride = matrix.stride(rows)
    return matrix.stride(columns) == 1 and stride >= matrix.shape[columns] and stride % 16 == 0


def emulated_grouped(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Emulate `torch._scaled_grouped_mm`. Rows of the result that belong to no expert are NaN, as they may be there."""
    assert a.dtype is b.dtype is torch.float8_e4m3fn and out_dtype is BF16 and bias is scale_result is None
    assert _is_row_major(a, -2, -1) and _is_row_major(b, -1, -2)
    assert a.shape[-1] % 16 == 0 and b.shape[-1] % 16 == 0 and b.shape[-2] % 16 == 0
    assert scale_a.dtype is scale_b.dtype is torch.float32 and scale_a.stride(-1) == scale_b.stride(-1) == 1
    assert (offs is None) == (a.dim() == b.dim() == 3)
    left, right = a.float(), b.float()
    if offs is None:
        assert scale_a.shape == a.shape[:2] and scale_b.shape == (b.shape[0], b.shape[2])
        return ((left @ right) * scale_a[:, :, None] * scale_b[:, None]).to(BF16)
    ends = [0, *offs.tolist()]
    assert offs.dtype is torch.int32 and offs.dim() == 1 and len(offs) < 1024 and ends == sorted(ends)
    groups = list(zip(ends, ends[1:], strict=False))
    if b.dim() == 2:
        assert all(first < last for first, last in groups), "CUTLASS cannot handle an empty sum"
        assert all((last - first) % 16 == 0 for first, last in groups[:-1])
        assert scale_a.shape == (len(offs) * a.shape[0],) and scale_b.shape == (len(offs) * b.shape[1],)
        sums = torch.stack([left[:, first:last] @ right[first:last] for first, last in groups])
        return (sums * scale_a.view(len(offs), -1, 1) * scale_b.view(len(offs), 1, -1)).to(BF16)
    assert len(offs) == b.shape[0] and a.shape[-1] == b.shape[-2]
    assert scale_a.shape == a.shape[:1] and scale_b.shape == (b.shape[0], b.shape[2])
    y = torch.full((a.shape[0], b.shape[2]), torch.nan)
    for number, (first, last) in enumerate(groups):
        y[first:last] = left[first:last] @ right[number] * scale_a[first:last, None] * scale_b[number]
    return y.to(BF16)
