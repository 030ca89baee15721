"""Scales: amaxes of blocks, the scale rules, and scales in their buffers (docs/formats).

Every line of a rule is one f32 operation on a tensor; the order of operations is part of the
format.
"""

import math
import struct

import torch
from torch import Tensor

from zerocast.backends.reference.codec import decode_e4m3, decode_e8m0, encode_e4m3, encode_e8m0, round_nominal
from zerocast.formats import AmaxPolicy, Block, FormatSpec, ScaleRule
from zerocast.formats.layout import Buffer, amax_grid
from zerocast.formats.spec import SCALE_SPREAD


def block_amax(x: Tensor, block: Block | None) -> Tensor:
    """Return the largest |x| of each block of an f32 matrix `[R, C]`, as `[block_rows,
    block_columns]`; NaN is ignored.
    """
    rows, columns = x.shape
    block_rows, block_columns = amax_grid(block, rows, columns)
    height, width = block or (rows, columns)
    padded = x.new_zeros(block_rows * height, block_columns * width)
    padded[:rows, :columns] = torch.where(x.isnan(), 0.0, x.abs())
    return padded.view(block_rows, height, block_columns, width).amax((1, 3))


def expand(grid: Tensor, block: Block | None, rows: int, columns: int) -> Tensor:
    """Repeat each block's value over its elements: `[block_rows, block_columns]` to `[rows,
    columns]`.
    """
    if block is None:
        return grid.expand(rows, columns)
    over = grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return over[:rows, :columns]


def fill_scales(grid: Tensor, repeat: Block, buffer: Buffer) -> Tensor:
    """Make a complete scale buffer: each scale of the grid repeated over rows or columns
    (`FormatSpec.scale_repeat`), then padding at the bottom and on the right.
    """
    full = torch.full(buffer.shape, buffer.padding, dtype=buffer.dtype, device=grid.device)
    if len(buffer.shape) == 1:
        return full.copy_(grid.view(1))
    grid = grid.repeat_interleave(repeat[0], 0).repeat_interleave(repeat[1], 1)
    full[: grid.shape[0], : grid.shape[1]] = grid
    return full


FLT_MIN = torch.finfo(torch.float32).tiny
FLT_MAX = torch.finfo(torch.float32).max


def f32(bits: int) -> float:
    """Return the f32 with these bits, in which form the formats specify their constants."""
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def divide(numerator: float, x: Tensor) -> Tensor:
    """Return `numerator / x`, rounded once; torch computes `scalar / tensor` as reciprocal times
    scalar.
    """
    return torch.full_like(x, numerator) / x


ONE_448TH = f32(0x3B124925)
ONE_6TH = f32(0x3E2AAAAB)
ONE_7TH = f32(0x3E124925)
BF16_MAX = torch.finfo(torch.bfloat16).max
ONE_2688TH = f32(0x39C30C31)  # 1 / (448 * 6), the largest scale times the largest code
ONE_2304TH = f32(0x39E38E39)  # 1 / (384 * 6), the largest exact scale times the largest code
E4M3_BIAS, E4M3_EIGHTH, E4M3_384 = 7, 0x20, 0x7C
ONE_OVER = {"e4m3": ONE_448TH, "e2m1": ONE_6TH}


def scale_from_amax(fmt: FormatSpec, amax: Tensor) -> Tensor:
    """Return the FP8 encode scale of FP32-scaled formats: `fp8_max / amax`, 1 for an amax of 0 or
    Inf.
    """
    assert fmt.element
    a = torch.where(amax < fmt.amax_epsilon, torch.full_like(amax, fmt.amax_epsilon), amax)
    s = divide(fmt.element.max, a)
    s = torch.where(s.isinf(), torch.full_like(s, FLT_MAX), s)
    if fmt.power_of_2_scale:
        s = (s.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(a.isinf() | a.isnan() | (a == 0), torch.ones_like(s), s)


def _nvfp4_global(amax: Tensor) -> Tensor:
    """Return the global scale S_enc, computed from the tensor amax."""
    s = divide(2688.0, amax.clamp(min=FLT_MIN)).clamp(max=FLT_MAX)
    return torch.where(amax > 0, s, torch.ones_like(s))


def _nvfp4_byte(fmt: FormatSpec, block_amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """Return the stored E4M3 scale sd of each block, as a byte."""
    v = block_amax * (_nvfp4_global(tensor_amax) * ONE_6TH)
    # TransformerEngine clamps with fminf, which turns a NaN into the largest value.
    v = torch.where(v <= FLT_MAX, v, torch.full_like(v, FLT_MAX))
    if not fmt.exact_scales:
        return encode_e4m3(v)
    return torch.where(tensor_amax.isinf(), encode_e4m3(v), _exact_byte(v) * (block_amax > 0))


def _exact_byte(v: Tensor) -> Tensor:
    """Return the E4M3 code of the number next to v, among those from 0.125 to 384 with a mantissa
    of 1, 1.25 or 1.5. Ties go up.
    """
    bits = v.contiguous().view(torch.int32)
    mantissa = (bits & 0x7FFFFF).float() * 2.0**-23 + 1.0
    # The mantissa bits of E4M3 count eighths. From 1.75 on the next number is 2, whose eighths
    # carry into the exponent.
    eighths = 2 * (mantissa >= 1.125) + 2 * (mantissa >= 1.375) + 4 * (mantissa >= 1.75)
    code = ((bits >> 23) - 127 + E4M3_BIAS) * 8 + eighths
    return code.clamp(E4M3_EIGHTH, E4M3_384).to(torch.uint8)


def stored_amax(fmt: FormatSpec, amax: Tensor) -> Tensor:
    """Return the tensor amax that is stored, and that scales are computed from.

    With exact scales it is 2688 times a bf16 number, the tensor scale. Inf stays, and such a tensor
    then has the scales of plain NVFP4.
    """
    if not fmt.exact_scales:
        return amax
    scale = round_nominal(amax * ONE_2304TH, torch.bfloat16).clamp(min=FLT_MIN)
    return torch.where((amax > 0) & ~amax.isinf(), (2688.0 * scale).clamp(max=FLT_MAX), amax)


def amax_of_stored(fmt: FormatSpec, stored: Tensor) -> Tensor:
    """Return an amax for which `stored_amax` gives `stored`."""
    if not fmt.exact_scales:
        return stored
    # 2304 times the tensor scale, unless the stored amax was clamped.
    return torch.where(stored < FLT_MAX, stored / 2688.0 * 2304.0, stored)


def _nvfp4_encode(fmt: FormatSpec, block_amax: Tensor, tensor_amax: Tensor) -> Tensor:
    s_enc = _nvfp4_global(tensor_amax)
    s_dec = divide(1.0, torch.where(s_enc > 0, s_enc, torch.ones_like(s_enc)))
    sd = decode_e4m3(_nvfp4_byte(fmt, block_amax, tensor_amax))
    return torch.where(sd > 0, divide(1.0, sd * s_dec).clamp(max=FLT_MAX), torch.full_like(sd, FLT_MAX))


def _e8m0_bytes(fmt: FormatSpec, amaxes: Tensor) -> Tensor:
    """Return the stored biased exponent of each block of `[block_rows, block_columns]` amaxes.

    If the format has scale groups, `amaxes` must hold complete groups, except at the edges of the
    weight.
    """
    assert fmt.element
    if fmt.scale_rounding == "floor":
        exponent = (amaxes.contiguous().view(torch.int32) >> 23) - int(math.log2(fmt.element.max))
        code = torch.where(amaxes.isinf(), 254, exponent.clamp(0, 254)).to(torch.uint8)
    else:
        code = encode_e8m0(amaxes * ONE_OVER[fmt.element.name])
    if fmt.scale_group is None:
        return code
    assert fmt.block
    blocks = fmt.scale_group[0] // fmt.block[0], fmt.scale_group[1] // fmt.block[1]
    largest = expand(block_amax(code.float(), blocks), blocks, *code.shape)
    return torch.maximum(code, (largest - SCALE_SPREAD).clamp(min=0).to(torch.uint8))


def _e8m0_encode(code: Tensor) -> Tensor:
    """Return 2**(127 - code), including the subnormal 2**-127."""
    return decode_e8m0(254 - code)


def _bf16_scale(amax: Tensor) -> Tensor:
    """Return the stored scale of each block, `amax / 7` as a bf16 number, in f32."""
    return round_nominal(amax * ONE_7TH, torch.bfloat16).clamp(max=BF16_MAX)


def encode_scales(fmt: FormatSpec, amaxes: Tensor, tensor_amax: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return the factor for the elements of each block before encoding, f32 of the shape of
    `amaxes`.
    """
    if fmt.scale_rule is ScaleRule.NONE:
        return torch.ones_like(amaxes)
    if fmt.scale_rule is ScaleRule.E8M0:
        return _e8m0_encode(_e8m0_bytes(fmt, amaxes))
    if fmt.scale_rule is ScaleRule.TWO_LEVEL:
        assert tensor_amax is not None
        return _nvfp4_encode(fmt, amaxes, tensor_amax)
    if fmt.scale_rule is ScaleRule.BF16:
        return divide(1.0, _bf16_scale(amaxes)).clamp(max=FLT_MAX)
    if fmt.amax_policy is AmaxPolicy.DELAYED:
        assert scale is not None
        return scale.expand_as(amaxes)
    return scale_from_amax(fmt, amaxes)


def stored_scales(fmt: FormatSpec, amaxes: Tensor, tensor_amax: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return the entry of the scale buffer for each block: f32 reciprocals, bf16 scales, or bytes,
    which are E8M0 or E4M3 codes.
    """
    if fmt.scale_rule is ScaleRule.E8M0:
        return _e8m0_bytes(fmt, amaxes)
    if fmt.scale_rule is ScaleRule.TWO_LEVEL:
        assert tensor_amax is not None
        return _nvfp4_byte(fmt, amaxes, tensor_amax)
    if fmt.scale_rule is ScaleRule.BF16:
        return _bf16_scale(amaxes)
    return divide(1.0, encode_scales(fmt, amaxes, tensor_amax, scale))


def scale_grid(buffer: Tensor, repeat: Block, block_rows: int, block_columns: int) -> Tensor:
    """Return the `[block_rows, block_columns]` scales that `fill_scales` repeated into a buffer."""
    return buffer[: block_rows * repeat[0] : repeat[0], : block_columns * repeat[1] : repeat[1]]


def decode_scales(fmt: FormatSpec, stored: Tensor, tensor_amax: Tensor | None) -> Tensor:
    """Return the factor for the decoded elements of each block, f32."""
    if fmt.scale_rule is ScaleRule.E8M0:
        return decode_e8m0(stored)
    if fmt.scale_rule is ScaleRule.TWO_LEVEL:
        assert tensor_amax is not None
        return (decode_e4m3(stored) * tensor_amax) * ONE_2688TH
    return stored.float()
