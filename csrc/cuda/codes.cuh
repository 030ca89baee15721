// Encoders and decoders of eight neighbouring elements: the bits of codec.h from the fastest
// instructions that a target has.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "codec.h"
#include "cuda/geometry.h"

namespace zerocast::cuda {

// Codes in memory order.
template <class E>
struct Codes8 {
  using Word = std::conditional_t<E::kBits == 4, uint32_t, uint2>;
};

// Rounds pairs to the nominal dtype in registers.
template <class Storage, class Nominal>
__device__ float2 to_nominal(float a, float b) {
  if constexpr (std::is_same_v<Storage, Nominal>) {
    return {a, b};
  } else if constexpr (std::is_same_v<Nominal, Bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return {__low2float(pair), __high2float(pair)};
  } else {
    return __half22float2(__floats2half2_rn(a, b));
  }
}

// Hardware conversions (sm_89 and newer) saturate, keep the sign of zero and give 0x7F for NaN, as
// docs/formats/common.md requires.
template <class E>
__device__ uint32_t encode_fp8_pair(float2 y) {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(y, __NV_SATFINITE, std::is_same_v<E, E5M2> ? __NV_E5M2 : __NV_E4M3);
#else
  return encode<E>(y.x) | encode<E>(y.y) << 8;
#endif
}

// The code of a magnitude, below 256 in the low bits of the result. A product that is NaN has its
// sign bit clear on this hardware, and fminf gives 6 for it, whose code is also NaN's.
//
// (2**22 + 1) * e + a, with e the power of two at or below a but at least 1, rounds a to units of e
// / 2 (the product is exact, so the one rounding is the addition's). The low bits of the sum are
// then the code + 2 - 2 * log2(e), and those of the exponent field of e, shifted, are 2 * log2(e) -
// 2.
__device__ inline uint32_t encode_e2m1_magnitude(float y) {
  const float a = fminf(fabsf(y), 6.0f);
  const int32_t e = larger(bits_of(a) & kInfinity, 0x3F800000);
  return bits_of(__fmaf_rn(float_of(e), 4194305.0f, a)) + (e >> 22);
}

// Only the architecture- and family-specific Blackwell targets (sm_100a, sm_100f, sm_120a ...) have
// the conversion; plain ones would silently compile an emulation.
#if __CUDA_ARCH__ >= 1000 && (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define ZC_HARDWARE_E2M1 1
#endif

#if defined(ZC_HARDWARE_E2M1)
// Two codes, the first in bits 3..0.
__device__ inline uint32_t encode_e2m1_pair(float2 y) {
  uint32_t codes;
  asm("{ .reg .b8 byte;\n cvt.rn.satfinite.e2m1x2.f32 byte, %2, %1;\n cvt.u32.u8 %0, byte; }"
      : "=r"(codes)
      : "f"(y.x), "f"(y.y));
  return codes;
}
#else
// Shifts a code in from the top: the encoder of codec.h in nine instructions.
__device__ inline uint32_t push_e2m1(uint32_t codes, float y) {
  codes = __funnelshift_r(codes, encode_e2m1_magnitude(y), 3);
  return __funnelshift_r(codes, static_cast<uint32_t>(bits_of(y)) >> 31, 1);
}
#endif

template <class E>
struct Encoder;

template <class E>
struct Fp8Encoder {
  using Word4 = uint32_t;
  // `y`, and likewise the pairs, are products.
  __device__ static uint2 encode8(const float2 (&y)[4]) {
    return {encode_fp8_pair<E>(y[0]) | encode_fp8_pair<E>(y[1]) << 16, encode_fp8_pair<E>(y[2]) | encode_fp8_pair<E>(y[3])
                                                                                                      << 16};
  }
  __device__ static Word4 encode4(float2 a, float2 b) { return encode_fp8_pair<E>(a) | encode_fp8_pair<E>(b) << 16; }
};
template <>
struct Encoder<E4M3> : Fp8Encoder<E4M3> {};
template <>
struct Encoder<E5M2> : Fp8Encoder<E5M2> {};

template <>
struct Encoder<E2M1> {
  __device__ static uint32_t encode8(const float2 (&y)[4]) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if defined(ZC_HARDWARE_E2M1)
      codes |= encode_e2m1_pair(y[i]) << (8 * i);
#else
      codes = push_e2m1(push_e2m1(codes, y[i].x), y[i].y);
#endif
    }
    return codes;
  }
  using Word4 = uint16_t;
  __device__ static Word4 encode4(float2 a, float2 b) {
#if defined(ZC_HARDWARE_E2M1)
    return static_cast<Word4>(encode_e2m1_pair(a) | encode_e2m1_pair(b) << 8);
#else
    return static_cast<Word4>(push_e2m1(push_e2m1(push_e2m1(push_e2m1(0, a.x), a.y), b.x), b.y) >> 16);
#endif
  }
};

template <>
struct Encoder<Int4> {
  __device__ static uint32_t encode8(const float2 (&y)[4]) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= (encode<Int4>(y[i].x) | encode<Int4>(y[i].y) << 4) << (8 * i);
    return codes;
  }
};

template <class E>
struct Decoder {
  // FP16 holds every value of E4M3 and of E5M2.
  __device__ static void decode8(uint2 codes, float2 (&y)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i < 2 ? codes.x : codes.y;
      const auto pair = static_cast<__nv_fp8x2_storage_t>(word >> (i % 2 * 16));
      y[i] = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, std::is_same_v<E, E5M2> ? __NV_E5M2 : __NV_E4M3)));
    }
  }
};

// The upper and the lower byte of a value as BF16 are looked up by three bits of its code.
template <>
struct Decoder<E2M1> {
  __device__ static void decode8(uint32_t codes, float2 (&y)[4]) {
    const uint32_t magnitudes = codes & 0x77777777u;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t upper = __byte_perm(0x3F3F3F00u, 0x40404040u, magnitudes >> (16 * half));
      const uint32_t lower = __byte_perm(0xC0800000u, 0xC0804000u, magnitudes >> (16 * half));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t signs = codes >> (16 * half + 8 * i);
        const uint32_t pair =
            __byte_perm(lower, upper, i ? 0x7362u : 0x5140u) | (signs << 12 & 0x8000u) | (signs << 24 & 0x80000000u);
        y[2 * half + i] = {float_of(static_cast<int32_t>(pair << 16)), float_of(static_cast<int32_t>(pair & 0xFFFF0000u))};
      }
    }
  }
};

template <>
struct Decoder<Int4> {
  __device__ static void decode8(uint32_t codes, float2 (&y)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = {decode<Int4>(codes >> (8 * i) & 15), decode<Int4>(codes >> (8 * i + 4) & 15)};
  }
};

}  // namespace zerocast::cuda
