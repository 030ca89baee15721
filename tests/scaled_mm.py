"""torch.nn.functional.scaled_mm as its documentation has it, in FP32 on any device: what the paths hand over must multiply to the
right numbers. Layouts are asserted; the swizzled order is the formula of cuBLAS's documentation, written out here once more.
"""

from typing import Any

import torch
from torch import Tensor

from zerocast.backends.reference.codec import decode_e2m1, decode_e4m3, decode_e8m0


def place(i: int, j: int, columns: int) -> int:
    """Where cuBLAS looks for scale (i, j) of a buffer with so many columns."""
    return ((i // 128) * (columns // 4) + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


def places(rows: int, columns: int) -> Tensor:
    """`place` of every scale of a matrix."""
    return torch.tensor([[place(i, j, columns) for j in range(columns)] for i in range(rows)])


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def _swizzled(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """The bytes `[rows, blocks]` of swizzled scales."""
    padded = _round_up(rows, 128), _round_up(blocks, 4)
    assert scales.dim() == 1 and scales.is_contiguous() and scales.numel() == padded[0] * padded[1]
    return scales.view(torch.uint8)[places(*padded)][:rows, :blocks]


def _columns(scale: Tensor) -> bool:
    """Whether it lies column by column without gaps; of a single column torch takes either stride."""
    return scale.stride() == (1, scale.shape[0]) or (scale.shape[1] == 1 and scale.stride() == (1, 1))


def _values(codes: Tensor) -> Tensor:
    if codes.dtype is torch.float4_e2m1fn_x2:
        data = codes.contiguous().view(torch.uint8)
        return decode_e2m1(torch.stack((data & 15, data >> 4), -1).flatten(1))
    return codes.float()


def decoded(codes: Tensor, scale: Any, scaling: list[str], swizzle: list[str], second: bool) -> Tensor:
    """An operand `[outer, inner]` in FP32, from its codes, its scales and how they lie; `second` is the right-hand one."""
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
    """In the place of `zerocast.gemm.torch_api.scaled_mm`."""
    assert a.is_contiguous()
    left = decoded(a, a_scale, a_scaling, list(swizzle), second=False)
    right = decoded(b.t(), b_scale, b_scaling, list(swizzle), second=True)
    y = left @ right.t()
    return (y if bias is None else y + bias.float()).to(dtype)
