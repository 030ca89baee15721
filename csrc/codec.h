// Codes and scale rules of every format, once, for host and device (docs/formats).
//
// Everything here is integer logic and single IEEE f32 operations without a branch, so that a loop
// over it vectorises and every backend gives the same bits. Compile with -ffp-contract=off (or
// --fmad=false), and keep subnormals.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "platform.h"

namespace zerocast {

constexpr int32_t kMagnitude = 0x7FFFFFFF;
constexpr int32_t kInfinity = 0x7F800000;
constexpr int32_t kNaN = 0x7FC00000;
constexpr float kFloatMin = 1.17549435e-38f;
constexpr float kFloatMax = 3.40282347e+38f;

ZC_HD int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

ZC_HD float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

ZC_HD bool is_nan(float x) { return x != x; }

ZC_HD bool is_nan(float x, float y) {  // either; one instruction
#if defined(__CUDA_ARCH__)
  return x != x || y != y;
#else
  return __builtin_isunordered(x, y);
#endif
}

ZC_HD int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
ZC_HD int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

// ---------------------------------------------------------------------------------------------------------------------
// Elements: small floats with a sign bit, `kMantissa` bits of mantissa and 2**kMinExponent as the
// smallest normal. kLimit bounds the encoder's input: the f32 bits of the largest value, or of the
// first value that IEEE rounds to infinity.

struct E4M3 {
  static constexpr int kBits = 8, kMantissa = 3, kMinExponent = -6;
  static constexpr int32_t kLimit = 0x43E00000;  // 448
  static constexpr int32_t kLargestCode = 0x7E, kNaNCode = 0x7F;
  static constexpr bool kHasInfinity = false;
};

struct E5M2 {
  static constexpr int kBits = 8, kMantissa = 2, kMinExponent = -14;
  static constexpr int32_t kLimit = 0x47600000;  // 57344: saturates, although the type has an infinity
  static constexpr int32_t kLargestCode = 0x7B, kNaNCode = 0x7F;
  static constexpr bool kHasInfinity = true;
};

struct E2M1 {
  static constexpr int kBits = 4, kMantissa = 1, kMinExponent = 0;
  static constexpr int32_t kLimit = 0x40C00000;  // 6
  static constexpr int32_t kLargestCode = 0x7, kNaNCode = 0x7;
  static constexpr bool kHasInfinity = false;
};

struct E5M10 {  // IEEE binary16
  static constexpr int kBits = 16, kMantissa = 10, kMinExponent = -14;
  static constexpr int32_t kLimit = 0x47800000;  // 65536, whose code is infinity's
  static constexpr int32_t kLargestCode = 0x7BFF, kNaNCode = 0x7FFF;
  static constexpr bool kHasInfinity = true;
};

// Rounds to nearest even by one addition: of x and a power of two whose last mantissa bit is one
// unit of the code, so the sum cannot hold anything smaller. The unit follows the exponent of x
// down to the smallest normal, so subnormals need no separate case. Counted in units, the power of
// two also converts the f32 exponent to that of the code; it is even, so ties still round to even.
//
// The code is built at the top of the word, where the sign of x is. `nan` replaces x by NaN.
template <class E>
ZC_HD int32_t encode(float x, bool nan) {
  constexpr int kDrop = 23 - E::kMantissa, kTop = 32 - E::kBits;
  constexpr int32_t kSmallestNormal = (127 + E::kMinExponent) << 23;
  constexpr int32_t kAnchor = (kDrop << 23) + (-(kSmallestNormal >> kDrop) & ((1 << E::kBits) - 1));
  const int32_t bits = bits_of(x);
  const int32_t clamped = smaller(bits & kMagnitude, E::kLimit);
  const int32_t exponent = larger(clamped & kInfinity, kSmallestNormal);
  const int32_t sum = bits_of(float_of(clamped) + float_of(exponent + kAnchor));
  const uint32_t magnitude = static_cast<uint32_t>(sum + (exponent >> kDrop)) << kTop;
  const uint32_t code = magnitude | (static_cast<uint32_t>(bits) & 0x80000000u);
  return static_cast<int32_t>((nan ? static_cast<uint32_t>(E::kNaNCode) << kTop : code) >> kTop);
}

template <class E>
ZC_HD int32_t encode(float x) {
  return encode<E>(x, is_nan(x));
}

// A subnormal code is decoded with an implicit bit, which is then subtracted: this is exact and
// never creates an f32 subnormal.
template <class E>
ZC_HD float decode(int32_t code) {
  constexpr int kDrop = 23 - E::kMantissa;
  constexpr int32_t kSmallestNormal = (127 + E::kMinExponent) << 23;
  const int32_t magnitude = code & ((1 << (E::kBits - 1)) - 1);
  const int32_t implicit = magnitude < (1 << E::kMantissa) ? kSmallestNormal : 0;
  const int32_t normal = (magnitude << kDrop) + kSmallestNormal - (1 << 23);
  const float value = float_of(normal + (implicit ? 1 << 23 : 0)) - float_of(implicit);
  const int32_t sign = static_cast<int32_t>(static_cast<uint32_t>(code) << (32 - E::kBits)) & ~kMagnitude;
  int32_t bits = bits_of(value);
  if constexpr (E::kHasInfinity) bits = magnitude > E::kLargestCode ? kInfinity : bits;
  bits |= sign;
  if constexpr (E::kNaNCode > E::kLargestCode) bits = magnitude > E::kLargestCode + E::kHasInfinity ? kNaN : bits;
  return float_of(bits);
}

struct Int4 {  // an integer from -7 to 7, stored as 8 more
  static constexpr int kBits = 4;
};

// The sum rounds to an integer, whose last four bits are the code.
template <>
ZC_HD int32_t encode<Int4>(float x, bool nan) {
  const float below = x < 7.0f ? x : 7.0f, clamped = below > -7.0f ? below : -7.0f;
  return nan ? 15 : bits_of(clamped + 12582920.0f) & 15;  // 1.5 * 2**23 + 8
}

template <>
ZC_HD float decode<Int4>(int32_t code) {
  return static_cast<float>(code - 8);
}

// ---------------------------------------------------------------------------------------------------------------------
// Storage types of masters and nominal weights. `narrow_number` is `narrow` for values other than
// NaN. `magnitude` is an integer that orders like the absolute value, 0 for NaN; `of_magnitude` is
// its inverse. `absolute` has NaN above Inf, which is kAbsoluteInfinity.

struct Float32 {
  using Word = uint32_t;
  ZC_HD static float widen(Word word) { return float_of(static_cast<int32_t>(word)); }
  ZC_HD static Word narrow(float x) { return static_cast<Word>(bits_of(x)); }
  ZC_HD static Word narrow_number(float x) { return narrow(x); }
  static constexpr int32_t kAbsoluteInfinity = kInfinity;
  ZC_HD static int32_t absolute(Word word) { return static_cast<int32_t>(word & 0x7FFFFFFFu); }
  ZC_HD static int32_t magnitude(Word word) { return absolute(word) > kAbsoluteInfinity ? 0 : absolute(word); }
  ZC_HD static float of_magnitude(int32_t m) { return float_of(m); }
};

struct Bfloat16 {
  using Word = uint16_t;
  ZC_HD static float widen(Word word) { return float_of(static_cast<int32_t>(static_cast<uint32_t>(word) << 16)); }
  // NaN becomes 0x7FFF, as in the hardware and as in FP8: sign and payload dropped.
  ZC_HD static Word narrow(float x) { return is_nan(x) ? Word{0x7FFF} : narrow_number(x); }
  ZC_HD static Word narrow_number(float x) {
    const uint32_t bits = static_cast<uint32_t>(bits_of(x));
    return static_cast<Word>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
  static constexpr int32_t kAbsoluteInfinity = 0x7F80;
  ZC_HD static int32_t absolute(Word word) { return word & 0x7FFF; }
  ZC_HD static int32_t magnitude(Word word) { return absolute(word) > kAbsoluteInfinity ? 0 : absolute(word); }
  ZC_HD static float of_magnitude(int32_t m) { return float_of(m << 16); }
};

struct Float16 {
  using Word = uint16_t;
  ZC_HD static float widen(Word word) { return decode<E5M10>(word); }
  ZC_HD static Word narrow(float x) { return static_cast<Word>(encode<E5M10>(x)); }
  ZC_HD static Word narrow_number(float x) { return static_cast<Word>(encode<E5M10>(x, false)); }
  static constexpr int32_t kAbsoluteInfinity = 0x7C00;
  ZC_HD static int32_t absolute(Word word) { return word & 0x7FFF; }
  ZC_HD static int32_t magnitude(Word word) { return absolute(word) > kAbsoluteInfinity ? 0 : absolute(word); }
  ZC_HD static float of_magnitude(int32_t m) { return decode<E5M10>(m); }
};

// f32 rounded to the nominal dtype, as f32. Rounding is monotone, so it commutes with the maximum.
template <class Nominal>
ZC_HD float round_to(float x) {
  return Nominal::widen(Nominal::narrow(x));
}

// The code of a master element: rounded to nominal, multiplied, encoded. A master that is already
// nominal is only widened.
template <class Master, class Nominal, class E>
ZC_HD int32_t encode_master(typename Master::Word word, float multiplier) {
  const float x = Master::widen(word);
  const float nominal = std::is_same_v<Master, Nominal> ? x : Nominal::widen(Nominal::narrow_number(x));
  const float scaled = nominal * multiplier;
  return encode<E>(scaled, is_nan(x, scaled));
}

// ---------------------------------------------------------------------------------------------------------------------
// Scale rules: the factor of an element before encoding, and the stored scale.

// FP32 scales (docs/formats/common.md): fp8_max / amax, 1 for an amax of 0, Inf or NaN.
ZC_HD float fp32_scale(float amax, float fp8_max, float epsilon, bool power_of_2) {
  const float a = amax < epsilon ? epsilon : amax;
  const float quotient = fp8_max / a;
  const float finite = bits_of(quotient) == kInfinity ? kFloatMax : quotient;
  const float scale = power_of_2 ? float_of(bits_of(finite) & kInfinity) : finite;
  const bool usable = a != 0.0f && (bits_of(a) & kMagnitude) < kInfinity;
  return usable ? scale : 1.0f;
}

// The scale for transient values (inputs of products, gradients between ranks), whose amax is given
// as its bits: NaN for one that is not finite, so that all values of the group come out as NaN.
ZC_HD float scale_or_nan(int32_t amax_bits, float fp8_max, bool power_of_2) {
  const float scale = fp32_scale(float_of(amax_bits), fp8_max, 0.0f, power_of_2);
  return amax_bits < kInfinity ? scale : float_of(kNaN);
}

// 1 / scale; NaN keeps its bits.
ZC_HD float inverse_of(float scale) { return is_nan(scale) ? scale : 1.0f / scale; }

// E8M0 scales (docs/formats/mxfp8.md and mxfp4.md): biased exponents, at most 254; 255 for NaN.
constexpr int32_t kScaleSpread = 14;  // SCALE_SPREAD of zerocast/formats/spec.py

struct PowerOfTwoScale {
  float inverse;     // 1 / the largest value of the element
  int32_t exponent;  // exponent of the largest value
  bool rounds_down;

  ZC_HD PowerOfTwoScale(bool is_fp4, bool down)
      : inverse(float_of(is_fp4 ? 0x3E2AAAAB : 0x3B124925)), exponent(is_fp4 ? 2 : 8), rounds_down(down) {}

  // The exponent of the next power of two at or above amax / largest. Adding ones to all mantissa
  // bits carries into the exponent unless the mantissa is zero; subnormals up to half the smallest
  // normal have exponent 0. Rounding down, the exponent of amax less that of the largest value.
  ZC_HD int32_t code(float amax) const {
    const uint32_t bits = static_cast<uint32_t>(bits_of(amax * inverse));
    const int32_t up = bits <= 0x400000u ? 0 : smaller(static_cast<int32_t>((bits + 0x7FFFFFu) >> 23), 254);
    const int32_t down = larger((bits_of(amax) >> 23) - exponent, 0);
    const int32_t finite = rounds_down && bits_of(amax) < kInfinity ? down : up;
    return is_nan(amax) ? 255 : finite;
  }
  // The same for a block in a group whose largest amax is `group`.
  ZC_HD int32_t code(float amax, float group) const { return larger(code(amax), code(group) - kScaleSpread); }

  // 2**(127 - code), including the subnormal 2**-127.
  ZC_HD static float multiplier(int32_t code) {
    const int32_t bits = larger((254 - code) << 23, 0x00400000);
    return float_of(code == 255 ? kNaN : bits);
  }
};

ZC_HD float e8m0_value(int32_t code) {
  const int32_t bits = larger(code << 23, 0x00400000);
  return float_of(code == 255 ? kNaN : bits);
}

// E2M1 codes with E8M0 scales as E4M3 codes with one scale a group of blocks (docs/formats/mxfp4.md).
constexpr int32_t kUpcastExponent = 6;  // UPCAST_EXPONENT of zerocast/formats/spec.py
constexpr int32_t kMostSpread = 31;     // from this value on every code is a zero

// `spread` is the exponent of the group's largest scale less that of the code's own.
ZC_HD int32_t upcast_code(int32_t code, int32_t spread) {
  return encode<E4M3>(decode<E2M1>(code) * e8m0_value(127 + kUpcastExponent - smaller(spread, kMostSpread)));
}

ZC_HD float upcast_scale(int32_t largest_exponent) { return e8m0_value(largest_exponent) * (1.0f / (1 << kUpcastExponent)); }

// Two-level scales (docs/formats/nvfp4.md). The order of operations is part of the format.

// The tensor amax that is stored under exact scales: 2688 times a bf16 number, the tensor scale. Inf
// stays, and the scales of such a tensor are then those of plain NVFP4.
ZC_HD float exact_tensor_amax(float amax) {
  const float scale = Bfloat16::widen(Bfloat16::narrow(amax * float_of(0x39E38E39)));  // 1 / (384 * 6), rounded
  const float product = 2688.0f * (scale > kFloatMin ? scale : kFloatMin);
  const float finite = product < kFloatMax ? product : kFloatMax;
  return amax > 0.0f && amax < float_of(kInfinity) ? finite : amax;
}

// The E4M3 code of the number next to `v`, among those from 0.125 to 384 with a mantissa of 1, 1.25
// or 1.5, of which E4M3 holds the products with every E2M1 code. Ties go up.
ZC_HD int32_t exact_scale_code(float v) {
  constexpr int32_t kEighth = 0x20, k384 = 0x7C;
  // Four bits for each eighth of a mantissa, from the lowest on: the quarters of the number next to it.
  constexpr int32_t kQuarters = 0x44222110;
  const int32_t eighth = bits_of(v) >> 20 & 7;
  const int32_t code = ((bits_of(v) >> 23) - 120) * 8 + 2 * (kQuarters >> 4 * eighth & 7);
  return smaller(larger(code, kEighth), k384);
}

struct TwoLevel {
  float multiplier;  // factor of a block's amax, before its E4M3 encoding
  float decode;      // 1 / S_enc
  bool exact;

  ZC_HD TwoLevel(float tensor_amax, bool exact_scales) {
    exact = exact_scales && tensor_amax < float_of(kInfinity);
    const float quotient = 2688.0f / (tensor_amax > kFloatMin ? tensor_amax : kFloatMin);
    const float finite = quotient < kFloatMax ? quotient : kFloatMax;
    const float scale = tensor_amax > 0.0f ? finite : 1.0f;
    multiplier = scale * float_of(0x3E2AAAAB);
    decode = 1.0f / (scale > 0.0f ? scale : 1.0f);
  }

  ZC_HD int32_t stored(float block_amax) const {
    const float v = block_amax * multiplier;
    const float finite = v <= kFloatMax ? v : kFloatMax;  // NaN, from Inf * 0, too
    if (exact) return block_amax > 0.0f ? exact_scale_code(finite) : 0;
    return encode<E4M3>(finite);
  }

  ZC_HD float encode_multiplier(float block_amax) const {
    const float scale = zerocast::decode<E4M3>(stored(block_amax));
    const float reciprocal = 1.0f / (scale * decode);
    const float finite = reciprocal < kFloatMax ? reciprocal : kFloatMax;
    return scale > 0.0f ? finite : kFloatMax;
  }
};

// The constant is 1 / 2688, rounded.
ZC_HD float two_level_value(int32_t stored, float tensor_amax) {
  return (decode<E4M3>(stored) * tensor_amax) * float_of(0x39C30C31);
}

// E2M1 codes with exact scales as E4M3 codes with one scale of the tensor (docs/formats/nvfp4.md).
ZC_HD int32_t exact_upcast_code(int32_t code, int32_t scale) {
  return encode<E4M3>(decode<E2M1>(code) * (decode<E4M3>(scale) * 0.125f));
}

ZC_HD float exact_upcast_scale(float tensor_amax) { return 8.0f * (tensor_amax * float_of(0x39C30C31)); }

// BF16 scales (docs/formats/int4.md): amax / 7 as a bf16 number, at most the largest one.
ZC_HD int32_t bf16_scale(float amax) {
  return smaller(Bfloat16::narrow(amax * float_of(0x3E124925)), 0x7F7F);  // 1 / 7, rounded
}

ZC_HD float bf16_multiplier(float amax) {
  const float reciprocal = 1.0f / Bfloat16::widen(static_cast<uint16_t>(bf16_scale(amax)));
  return reciprocal < kFloatMax ? reciprocal : kFloatMax;
}

// Delayed scaling (docs/formats/fp8_delayed.md): the scale of the next cast, or `previous` if the
// amax gives none.
ZC_HD float delayed_scale(float amax, float numerator, float previous) {
  const bool usable = amax > 0.0f && amax < float_of(kInfinity);
  const float scale = usable ? numerator / amax : previous;
  return (bits_of(scale) & kMagnitude) == kInfinity ? kFloatMax : scale;
}

}  // namespace zerocast
