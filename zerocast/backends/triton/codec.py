"""Encoders, decoders and the rounding to 16 bits in integer logic (docs/formats/common.md).

Triton's own float8 conversions are not used: they differ from the formats for overflow, NaN and
Inf, and between compiler and interpreter. Only the rounding of subnormal codes is left to the
hardware, as one f32 addition.
"""

import torch
import triton
import triton.language as tl

INF = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def magnitude(x):
    """Return the bits of |x| as int32, which order as the values do, with NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def as_f32(bits):
    """Return the f32 with these bits."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """Round f32 to bf16 (RNE, overflow to Inf), as int32 bits in the upper half of a word; NaN is
    0x7FFF.
    """
    a = magnitude(x)
    # The minimum also keeps the next sum within 31 bits.
    bounded = tl.minimum(a, INF)
    rounded = (bounded + 0x7FFF + ((bounded >> 16) & 1)) & 0x7FFF0000
    signed = rounded | (x.to(tl.int32, bitcast=True) & ~MAGNITUDE)
    return tl.where(a > INF, 0x7FFF0000, signed)


@triton.jit
def fp16_bits(x):
    """Round f32 to fp16 (RNE, overflow to Inf), as int32 bits in the lower half of a word; NaN is
    0x7FFF.
    """
    half = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.where(magnitude(x) > INF, 0x7FFF, half)


@triton.jit
def round_nominal(x, NOMINAL: tl.constexpr):
    """Round f32 to the nominal dtype, as f32; the bits of a NaN are unspecified."""
    if NOMINAL == tl.bfloat16:
        x = as_f32(bf16_bits(x))
    if NOMINAL == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    a = bits & MAGNITUDE
    bounded = tl.minimum(a, LARGEST)
    drop: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (drop - 1)) - 1
    normal = ((bounded + half + ((bounded >> drop) & 1)) >> drop) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal the code counts multiples of 2**(1 - BIAS - MANTISSA): the unit of
    # this sum's last bit.
    unit: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    subnormal = (as_f32(bounded) + as_f32(a * 0 + unit)).to(tl.int32, bitcast=True) - unit
    smallest_normal: tl.constexpr = (128 - BIAS) << 23
    code = tl.where(bounded < smallest_normal, subnormal, normal)
    sign = (bits >> 31) & (NAN + 1)
    return tl.where(a > INF, NAN, code | sign)


@triton.constexpr_function
def codes_per_byte(element):
    """Return 2 for 4-bit codes, else 1."""
    return 2 if element in ("e2m1", "int4") else 1


@triton.jit
def _encode_int4(x):
    clamped = tl.where(x < 7.0, x, 7.0)
    clamped = tl.where(clamped > -7.0, clamped, -7.0)
    # The sum with 1.5 * 2**23 + 8 rounds to an integer, whose last four bits are the code.
    code = (clamped + 12582920.0).to(tl.int32, bitcast=True) & 15
    return tl.where(magnitude(x) > INF, 15, code)


@triton.jit
def encode(x, ELEMENT: tl.constexpr):
    """Convert f32 to codes as int32: RNE, saturating, NaN to the largest code pattern without
    sign.
    """
    if ELEMENT == "e4m3":
        return _encode(x, 3, 7, 0x43E00000, 0x7F)
    elif ELEMENT == "e5m2":
        return _encode(x, 2, 15, 0x47600000, 0x7F)
    elif ELEMENT == "int4":
        return _encode_int4(x)
    else:
        return _encode(x, 1, 1, 0x40C00000, 7)


@triton.jit
def encode_e8m0(x):
    """Convert non-negative f32 to the biased exponent, as int32, of the next power of two at or
    above it.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    bump = (mantissa > 0) & (exponent < 0xFE) & ((exponent > 0) | (mantissa > 0x400000))
    code = tl.where(bits == INF, 254, exponent + bump.to(tl.int32))
    return tl.where(bits > INF, 255, code)


@triton.jit
def _decode(
    code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr, INFINITE: tl.constexpr, NAN: tl.constexpr
):
    a = code & (SIGN - 1)
    normal = as_f32((a + ((127 - BIAS) << MANTISSA)) << (23 - MANTISSA))
    unit: tl.constexpr = (128 - BIAS - MANTISSA) << 23
    subnormal = a.to(tl.float32) * as_f32(a * 0 + unit)
    value = tl.where(a < (1 << MANTISSA), subnormal, normal).to(tl.int32, bitcast=True)
    value = tl.where(a >= INFINITE, INF, value)
    value = tl.where(a >= NAN, 0x7FC00000, value)
    return as_f32(tl.where(code >= SIGN, value | ~MAGNITUDE, value))


@triton.jit
def decode(code, ELEMENT: tl.constexpr):
    """Convert codes as int32 to f32, with the NaN of E4M3 and the NaN and Inf of E5M2."""
    if ELEMENT == "e4m3":
        return _decode(code, 3, 7, 0x80, 0x7F, 0x7F)
    elif ELEMENT == "e5m2":
        return _decode(code, 2, 15, 0x80, 0x7C, 0x7D)
    elif ELEMENT == "int4":
        return code.to(tl.float32) - 8.0
    else:
        return _decode(code, 1, 1, 8, 8, 8)


@triton.jit
def decode_e8m0(code):
    """Convert biased exponents as int32 to f32 powers of two; 0 is the subnormal 2**-127 and 255 is
    NaN.
    """
    bits = tl.where(code == 0, 0x00400000, tl.minimum(code, 254) << 23)
    return as_f32(tl.where(code == 255, 0x7FC00000, bits))
