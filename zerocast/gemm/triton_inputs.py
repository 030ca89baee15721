"""The FP8 quantizers of `inputs.py` as Triton kernels: the same bytes, with scales computed in the
same kernel.

Quantizing in groups is one pass over the input. Quantizing per tensor is one pass for the amax, by
torch, and one for the codes. Codes come from integer logic, since Triton's own float8 conversions
deviate from the format, and differ between compiler and interpreter. Values are in range by
construction (`inputs.py`), so nothing saturates here. Multiply and add are never contracted.
"""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerocast.formats import Element
from zerocast.gemm import scaling

# Bits of the mantissa by element.
MANTISSA = {"e4m3": 3, "e5m2": 2}
# Rows per program of `_groups`, and elements per program of `_whole`.
ROWS = 32
ELEMENTS = 4096

INF = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
ONE = tl.constexpr(0x3F800000)
FLT_MAX = tl.constexpr(0x7F7FFFFF)


@triton.jit
def _magnitude(x):
    """Return the bits of |x| as int32. They are ordered like the values, with NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load(x, at, mask):
    """Load the values at the offsets `at` as f32, 0 where masked."""
    # bf16 comes as int16, since Triton's interpreter converts bf16 subnormals wrongly.
    value = tl.load(x + at, mask=mask, other=0)
    if x.dtype.element_ty == tl.int16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _scale(amax_bits, LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Return the result of `scaling.encode_scale`, from the bits of the amax."""
    s = tl.div_rn(LARGEST, amax_bits.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    s = tl.minimum(s, FLT_MAX)
    if POWER_OF_2:
        s = s & INF
    s = tl.where(amax_bits == 0, ONE, s)
    return tl.where(amax_bits >= INF, NAN, s).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, MANTISSA: tl.constexpr):
    """Return the codes of f32 values in the range of the element, rounded to nearest even; NaN is
    0x7F. The exponent bias is 7 for E4M3 and 15 for E5M2.
    """
    bias: tl.constexpr = 7 if MANTISSA == 3 else 15
    drop: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (drop - 1)) - 1
    bits = _magnitude(x)
    normal = ((bits + half + ((bits >> drop) & 1)) >> drop) - ((127 - bias) << MANTISSA)
    # Below the smallest normal the code counts multiples of 2**(1 - bias - mantissa). Adding `unit`
    # makes that the last bit of the sum, so the hardware's addition rounds to it.
    unit: tl.constexpr = (151 - bias - MANTISSA) << 23
    shifted = bits.to(tl.float32, bitcast=True) + (bits * 0 + unit).to(tl.float32, bitcast=True)
    code = tl.where(bits < ((128 - bias) << 23), shifted.to(tl.int32, bitcast=True) - unit, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(bits > INF, 0x7F, code | sign).to(tl.uint8)


@triton.jit
def _groups(
    x,
    codes,
    scale_inv,
    rows,
    columns,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
):
    """Quantize one group of `ROWS` rows: x `[rows, columns]` to codes of that shape and scale_inv
    `[columns / WIDTH, rows]`.
    """
    # Offsets are int64, since a tensor may have more than 2**31 elements.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    here = row < rows
    at = row[:, None] * columns + group * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = _load(x, at, here[:, None])
    scale = _scale(tl.max(_magnitude(value), 1), LARGEST, POWER_OF_2)
    tl.store(codes + at, _encode(value * scale[:, None], MANTISSA), mask=here[:, None])
    tl.store(scale_inv + group.to(tl.int64) * rows + row, tl.div_rn(1.0, scale), mask=here)


@triton.jit
def _whole(x, amax, codes, scale_inv, numel, ELEMENTS: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr):
    """Quantize `ELEMENTS` elements of a tensor whose amax is known; the first program writes
    scale_inv.
    """
    program = tl.program_id(0)
    scale = _scale(_magnitude(tl.load(amax)), LARGEST, False)
    at = program.to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    value = _load(x, at, at < numel)
    tl.store(codes + at, _encode(value * scale, MANTISSA), mask=at < numel)
    if program == 0:
        tl.store(scale_inv, tl.div_rn(1.0, scale))


def _launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*arguments, num_warps=4, enable_fp_fusion=False)


def _loadable(x: Tensor) -> Tensor:
    """Return `x`, contiguous, with bf16 as int16 for `_load`."""
    x = x.contiguous()
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def per_tensor(x: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Quantize `x` to the same bytes as `inputs.per_tensor`, in two launches."""
    amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale_inv = torch.empty(1, device=x.device, dtype=torch.float32)
    constants = ELEMENTS, MANTISSA[element.name], element.max
    grid = (triton.cdiv(x.numel(), ELEMENTS),)
    _launch(_whole, grid, x.device, _loadable(x), amax, codes, scale_inv, x.numel(), *constants)
    return codes.view(element.dtype), scale_inv


def groups(x: Tensor, width: int, element: Element, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Quantize `x` to the same bytes as `inputs.groups`. Scales are stored column by column."""
    rows, columns = x.shape
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale_inv = torch.empty(columns // width, rows, device=x.device, dtype=torch.float32)
    constants = width, ROWS, MANTISSA[element.name], element.max, power_of_2
    grid = triton.cdiv(rows, ROWS), columns // width
    _launch(_groups, grid, x.device, _loadable(x), codes, scale_inv, rows, columns, *constants)
    return codes.view(element.dtype), scale_inv.t()


def groups_both_ways(x: Tensor, width: int, element: Element, power_of_2: bool, is_square: bool) -> scaling.BothWays:
    """Quantize `x` to the same bytes as `inputs.groups_both_ways`, one launch per direction."""
    return scaling.both_ways_by(groups, x, width, element, power_of_2, is_square)


def tensor_both_ways(x: Tensor, amax: Tensor | None, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `x` to the same bytes as `inputs.per_tensor_both_ways`. `amax` is not used."""
    codes, scale_inv = per_tensor(x, element)
    return codes, scale_inv, scaling.turned(codes)
