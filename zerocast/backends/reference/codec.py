"""Encoders and decoders in integer and compare logic (docs/formats/common.md and mxfp8.md).

Torch's own FP8 casts are not used, since torch versions differ for overflow, NaN and Inf.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zerocast.formats import Element

INF_BITS = 0x7F800000


def to_nominal(x: Tensor, nominal: torch.dtype) -> Tensor:
    """Return `x` rounded to the nominal dtype: RNE, overflow to Inf.

    In 16 bits NaN becomes 0x7FFF, as in hardware; the bits of torch's NaN depend on its position.
    """
    if x.dtype == nominal or nominal is torch.float32:
        return x.to(nominal)
    nan = torch.tensor(0x7FFF, dtype=torch.int16, device=x.device).view(nominal)
    return torch.where(x.isnan(), nan, x.to(nominal))


def round_nominal(x: Tensor, nominal: torch.dtype) -> Tensor:
    """Return `x` rounded to the nominal dtype, as f32."""
    return to_nominal(x, nominal).float()


def _encode_fp8(x: Tensor, mantissa: int, bias: int, largest: float) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF

    drop = 23 - mantissa
    rounded = magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)
    normal = (rounded >> drop) - ((127 - bias) << mantissa)

    # Below the smallest normal the code counts multiples of 2**(1 - bias - mantissa).
    significand = (magnitude & 0x7FFFFF) | 0x800000
    shift = (drop + 128 - bias - (magnitude >> 23)).clamp(1, 26)
    half = (1 << (shift - 1)) - 1
    subnormal = (significand + half + ((significand >> shift) & 1)) >> shift

    smallest_normal = (128 - bias) << 23
    code = torch.where(magnitude < smallest_normal, subnormal, normal)
    largest_bits = int(torch.tensor(largest, dtype=torch.float32).view(torch.int32))
    largest_code = (largest_bits >> drop) - ((127 - bias) << mantissa)
    code = torch.where(magnitude > largest_bits, torch.full_like(code, largest_code), code)
    code = torch.where(magnitude > INF_BITS, torch.full_like(code, 0x7F), code | sign)
    return code.to(torch.uint8)


def encode_e4m3(x: Tensor) -> Tensor:
    """Convert f32 to E4M3 codes: RNE, saturating, NaN to 0x7F."""
    return _encode_fp8(x, mantissa=3, bias=7, largest=448.0)


def encode_e5m2(x: Tensor) -> Tensor:
    """Convert f32 to E5M2 codes: RNE, saturating, NaN to 0x7F."""
    return _encode_fp8(x, mantissa=2, bias=15, largest=57344.0)


def encode_e2m1(x: Tensor) -> Tensor:
    """Convert f32 to E2M1 codes 0..15, one per byte: RNE with ties to the even code, saturating,
    NaN to +6.
    """
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for above in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0):
        code += above
    code |= torch.signbit(x).to(torch.uint8) << 3
    return torch.where(x.isnan(), torch.full_like(code, 7), code)


def encode_int4(x: Tensor) -> Tensor:
    """Convert f32 to 8 plus the nearest integer from -7 to 7, one per byte: RNE, NaN to 15."""
    return torch.where(x.isnan(), 15.0, x.clamp(-7.0, 7.0).round() + 8.0).to(torch.uint8)


def encode_e8m0(x: Tensor) -> Tensor:
    """Convert non-negative f32 to the biased exponent of the next power of two at or above it."""
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    bump = (mantissa > 0) & (exponent < 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = torch.where(bits == INF_BITS, torch.full_like(exponent, 254), exponent + bump)
    return torch.where(bits > INF_BITS, torch.full_like(code, 255), code).to(torch.uint8)


def _decode_fp8(code: Tensor, mantissa: int, bias: int) -> Tensor:
    c = code.to(torch.int32)
    magnitude = c & 0x7F
    normal = ((magnitude + ((127 - bias) << mantissa)) << (23 - mantissa)).view(torch.float32)
    subnormal = magnitude.float() * 2.0 ** (1 - bias - mantissa)
    value = torch.where(magnitude < (1 << mantissa), subnormal, normal)
    return torch.where(c > 0x7F, -value, value)


def decode_e4m3(code: Tensor) -> Tensor:
    """Convert E4M3 codes to f32; 0x7F and 0xFF are NaN."""
    value = _decode_fp8(code, mantissa=3, bias=7)
    return torch.where((code & 0x7F) == 0x7F, torch.full_like(value, torch.nan), value)


def decode_e5m2(code: Tensor) -> Tensor:
    """Convert E5M2 codes to f32, with the Inf and NaN codes of IEEE."""
    value = _decode_fp8(code, mantissa=2, bias=15)
    value = torch.where((code & 0x7F) == 0x7C, torch.copysign(torch.full_like(value, torch.inf), value), value)
    return torch.where((code & 0x7F) > 0x7C, torch.full_like(value, torch.nan), value)


def decode_e2m1(code: Tensor) -> Tensor:
    """Convert E2M1 codes 0..15, one per byte, to f32."""
    c = code.to(torch.int32)
    magnitude = c & 7
    exponent, mantissa = magnitude >> 1, magnitude & 1
    normal = (2 + mantissa).float() * torch.pow(2.0, (exponent - 2).float())
    value = torch.where(exponent == 0, mantissa.float() * 0.5, normal)
    return torch.where(c > 7, -value, value)


def decode_int4(code: Tensor) -> Tensor:
    """Convert INT4 codes 0..15, one per byte, to f32."""
    return code.float() - 8.0


def decode_e8m0(code: Tensor) -> Tensor:
    """Convert biased exponents to f32 powers of two; 0 is the subnormal 2**-127 and 255 is NaN."""
    c = code.to(torch.int32)
    bits = torch.where(c == 0, torch.full_like(c, 0x00400000), c << 23)
    return torch.where(c == 255, torch.full_like(bits, 0x7FC00000), bits).view(torch.float32)


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "e4m3": encode_e4m3,
    "e5m2": encode_e5m2,
    "e2m1": encode_e2m1,
    "int4": encode_int4,
}
_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "e4m3": decode_e4m3,
    "e5m2": decode_e5m2,
    "e2m1": decode_e2m1,
    "int4": decode_int4,
}


def encode(element: Element, x: Tensor) -> Tensor:
    """Convert f32 to codes of `element`, one per byte."""
    return _ENCODERS[element.name](x)


def decode(element: Element, code: Tensor) -> Tensor:
    """Convert codes of `element`, one per byte, to f32."""
    return _DECODERS[element.name](code)


def pack(codes: Tensor) -> Tensor:
    """Pack 4-bit codes `[..., K]` into bytes `[..., K/2]`: the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(data: Tensor) -> Tensor:
    """Unpack bytes `[..., K/2]` into 4-bit codes `[..., K]`."""
    return torch.stack((data & 0xF, data >> 4), -1).flatten(-2)
