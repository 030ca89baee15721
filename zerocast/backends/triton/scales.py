"""Scale rules inside a kernel: stored scales and encoding factors from amaxes (docs/formats).

Every line is one f32 operation; the order of operations is part of the format. All functions accept
scalars and blocks.
"""

import struct
from typing import Any

import triton
import triton.language as tl

from zerocast.backends.triton.codec import (
    INF,
    as_f32,
    bf16_bits,
    decode,
    decode_e8m0,
    encode,
    encode_e8m0,
    round_nominal,
)
from zerocast.formats import FormatSpec, ScaleRule
from zerocast.formats.spec import SCALE_SPREAD

FP32 = tl.constexpr(int(ScaleRule.FP32))
E8M0 = tl.constexpr(int(ScaleRule.E8M0))
BF16 = tl.constexpr(int(ScaleRule.BF16))
TWO_LEVEL = tl.constexpr(int(ScaleRule.TWO_LEVEL))
# Two-level scales that are exact in FP8 (FormatSpec.exact_scales). Only this file distinguishes
# them from plain ones; kernels compare with `>= TWO_LEVEL`.
EXACT_TWO_LEVEL = tl.constexpr(int(ScaleRule.TWO_LEVEL) + 1)

SPREAD = tl.constexpr(SCALE_SPREAD)
FLT_MIN = tl.constexpr(2.0**-126)
FLT_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
ONE_448TH = tl.constexpr(0x124925 * 2.0**-32 + 2.0**-9)  # 0x3B124925
ONE_6TH = tl.constexpr(0x2AAAAB * 2.0**-26 + 2.0**-3)  # 0x3E2AAAAB
ONE_7TH = tl.constexpr(0x124925 * 2.0**-26 + 2.0**-3)  # 0x3E124925
ONE_2304TH = tl.constexpr(0x638E39 * 2.0**-35 + 2.0**-12)  # 0x39E38E39
ONE_2688TH = tl.constexpr(0x430C31 * 2.0**-35 + 2.0**-12)  # 0x39C30C31


def rule_constants(fmt: FormatSpec) -> dict[str, Any]:
    """Return the scale rule of a format as compile-time arguments of the kernels."""
    return {
        "RULE": EXACT_TWO_LEVEL.value if fmt.exact_scales else int(fmt.scale_rule),
        "LARGEST": fmt.element.max if fmt.element else 0.0,
        "POWER_OF_2": fmt.power_of_2_scale,
        "EPSILON": struct.unpack("<I", struct.pack("<f", fmt.amax_epsilon))[0],
    }


def group_constants(fmt: FormatSpec) -> dict[str, Any]:
    """Return the scale groups of a format in blocks, 0 if it has none, and its rounding of E8M0
    exponents, as compile-time arguments of the kernels.
    """
    assert fmt.block
    rows, columns = fmt.scale_group or (0, 0)
    block_rows, block_columns = rows // fmt.block[0], columns // fmt.block[1]
    return {"GROUP_ROWS": block_rows, "GROUP_COLUMNS": block_columns, "ROUNDS_DOWN": fmt.scale_rounding == "floor"}


@triton.jit
def scale_from_amax(amax, LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr, EPSILON: tl.constexpr):
    """Return `LARGEST / amax`, or 1 for an amax of 0 or Inf; EPSILON is passed as its f32 bits."""
    bits = tl.maximum(amax.to(tl.int32, bitcast=True), EPSILON)
    s = tl.div_rn(LARGEST, as_f32(bits)).to(tl.int32, bitcast=True)
    s = tl.where(s == INF, 0x7F7FFFFF, s)
    if POWER_OF_2:
        s = s & INF
    return as_f32(tl.where((bits == 0) | (bits >= INF), 0x3F800000, s))


@triton.jit
def stored_amax(amax, RULE: tl.constexpr):
    """Return the tensor amax that is stored, and that two-level scales are computed from."""
    if RULE == EXACT_TWO_LEVEL:
        scale = round_nominal(amax * ONE_2304TH, tl.bfloat16)
        product = tl.minimum(2688.0 * tl.maximum(scale, FLT_MIN), FLT_MAX)
        return tl.where((amax > 0) & (amax.to(tl.int32, bitcast=True) < INF), product, amax)
    else:
        return amax


@triton.jit
def two_level_global(amax):
    """Return the global scale S_enc, computed from the tensor amax."""
    s = tl.minimum(tl.div_rn(2688.0, tl.maximum(amax, FLT_MIN)), FLT_MAX)
    return tl.where(amax > 0, s, 1.0)


@triton.jit
def two_level_byte(amax, s_enc, RULE: tl.constexpr):
    """Return the stored E4M3 scale sd of each block, as an int32 code."""
    v = amax * (s_enc * ONE_6TH)
    # TransformerEngine clamps with fminf, which turns a NaN into the largest value.
    finite = tl.where(v <= FLT_MAX, v, FLT_MAX)
    code = encode(finite, "e4m3")
    if RULE == EXACT_TWO_LEVEL:
        # A tensor amax of Inf makes s_enc 0. The scales of blocks then equal plain NVFP4's.
        code = tl.where(s_enc > 0, tl.where(amax > 0, exact_code(finite), 0), code)
    return code


@triton.jit
def exact_code(v):
    """Return the E4M3 code of the number next to v, among those from 0.125 to 384 with a mantissa
    of 1, 1.25 or 1.5. Ties go up.
    """
    bits = v.to(tl.int32, bitcast=True)
    # In the constant each four bits hold the quarters of the number next to one eighth.
    quarters = (0x44222110 >> (((bits >> 20) & 7) * 4)) & 7
    code = ((bits >> 23) - 120) * 8 + 2 * quarters
    return tl.minimum(tl.maximum(code, 0x20), 0x7C)


@triton.jit
def two_level_encode(amax, s_enc, RULE: tl.constexpr):
    """Return the encoding factor of each block of a two-level format."""
    s_dec = tl.div_rn(1.0, tl.where(s_enc > 0, s_enc, 1.0))
    sd = decode(two_level_byte(amax, s_enc, RULE), "e4m3")
    return tl.where(sd > 0, tl.minimum(tl.div_rn(1.0, sd * s_dec), FLT_MAX), FLT_MAX)


@triton.jit
def _e8m0_alone(amax, LARGEST: tl.constexpr, ROUNDS_DOWN: tl.constexpr):
    if ROUNDS_DOWN:
        bits = amax.to(tl.int32, bitcast=True)
        drop: tl.constexpr = 2 if LARGEST == 6.0 else 8
        return tl.where(bits >= INF, 254, tl.maximum((bits >> 23) - drop, 0))
    else:
        return encode_e8m0(amax * (ONE_6TH if LARGEST == 6.0 else ONE_448TH))


@triton.jit
def e8m0_byte(amax, group, LARGEST: tl.constexpr, GROUPED: tl.constexpr, ROUNDS_DOWN: tl.constexpr):
    """Return the stored exponent of each block; `group` holds the largest amax of its scale
    group.
    """
    code = _e8m0_alone(amax, LARGEST, ROUNDS_DOWN)
    if GROUPED:
        code = tl.maximum(code, _e8m0_alone(group, LARGEST, ROUNDS_DOWN) - SPREAD)
    return code


@triton.jit
def bf16_word(amax):
    """Return the stored bf16 scale of each block, `amax / 7`, as the int32 value of its bits."""
    return tl.minimum(bf16_bits(amax * ONE_7TH) >> 16, 0x7F7F)


@triton.jit
def encode_scale(
    amax,
    group,
    s_enc,
    RULE: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EPSILON: tl.constexpr,
    GROUPED: tl.constexpr,
    ROUNDS_DOWN: tl.constexpr,
):
    """Return the factor for the elements of each block before encoding; `group` is for E8M0 scales,
    `s_enc` for two-level ones.
    """
    if RULE >= TWO_LEVEL:
        return two_level_encode(amax, s_enc, RULE)
    elif RULE == BF16:
        return tl.minimum(tl.div_rn(1.0, as_f32(bf16_word(amax) << 16)), FLT_MAX)
    elif RULE == E8M0:
        return decode_e8m0(254 - e8m0_byte(amax, group, LARGEST, GROUPED, ROUNDS_DOWN))
    else:
        return scale_from_amax(amax, LARGEST, POWER_OF_2, EPSILON)


@triton.jit
def stored_scale(
    amax,
    group,
    s_enc,
    RULE: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EPSILON: tl.constexpr,
    GROUPED: tl.constexpr,
    ROUNDS_DOWN: tl.constexpr,
):
    """Return the entry of the scale buffer: an f32 reciprocal, or as int32 the bits of a bf16 scale
    or an E8M0 or E4M3 code.
    """
    if RULE >= TWO_LEVEL:
        return two_level_byte(amax, s_enc, RULE)
    elif RULE == BF16:
        return bf16_word(amax)
    elif RULE == E8M0:
        return e8m0_byte(amax, group, LARGEST, GROUPED, ROUNDS_DOWN)
    else:
        return tl.div_rn(1.0, scale_from_amax(amax, LARGEST, POWER_OF_2, EPSILON))


@triton.jit
def decode_scale(stored, amax, RULE: tl.constexpr):
    """Return the factor for decoded elements of each block; `stored` is the result of
    `stored_scale`.
    """
    if RULE == TWO_LEVEL:
        return (decode(stored, "e4m3") * amax) * ONE_2688TH
    elif RULE == E8M0:
        return decode_e8m0(stored)
    elif RULE == BF16:
        return as_f32(stored << 16)
    else:
        return stored
