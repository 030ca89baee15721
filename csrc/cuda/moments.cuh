// AdamW on elements in registers whose moments are kept in 8 bits (docs/formats/moments_8bit.md).
//
// A code is defined by comparisons with the values of codes, so a code whose place is far from those
// boundaries may be computed by approximate instructions. `QuickGroup` does so for nearly all
// elements of ordinary groups, and says of the others that they are doubtful; `ExactGroup` is the
// definition.
#pragma once

#include "cuda/adam.cuh"
#include "moments.h"

namespace zerocast::cuda {

// Both moments, fresh, and the decayed master of an element.
struct Updated {
  float p, m, v;
};

__device__ inline Updated fresh(float p, float g, float old_m, float old_v, const AdamScalars& s, float clip) {
  g = __fmul_rn(g, clip);
  return {__fmul_rn(p, s.decay), __fadd_rn(__fmul_rn(s.beta1, old_m), __fmul_rn(s.one_minus_beta1, g)),
          __fadd_rn(__fmul_rn(s.beta2, old_v), __fmul_rn(__fmul_rn(s.one_minus_beta2, g), g))};
}

__device__ inline float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float approximate_root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float approximate_inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Divides by a number between 2**-60 and 2**62, and rounds correctly where the quotient and its last
// bit are normal numbers: the instructions of __fdiv_rn without its test of the operands.
class Divisor {
 public:
  __device__ explicit Divisor(float x) : x_(x) {
    const float y = approximate_reciprocal(x);
    inverse_ = __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y);
  }

  __device__ float divide(float a) const {
    const float quotient = __fmul_rn(a, inverse_);
    return __fmaf_rn(inverse_, __fmaf_rn(-x_, quotient, a), quotient);
  }

 private:
  float x_, inverse_;
};

// The square root of a number between 2**-100 and 2**62, correctly rounded: the instructions of
// __fsqrt_rn without its test of the operand.
__device__ inline float ordinary_root(float x) {
  const float y = approximate_inverse_root(x), root = __fmul_rn(x, y);
  return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(0.5f, y), root);
}

// Moments of ordinary elements are at least this, and those of ordinary groups are below kOrdinaryMost.
constexpr float kOrdinaryLeast = 0x1p-96f, kOrdinaryMost = 0x1p38f;

// The values that all elements of a step share.
struct StepScalars {
  AdamScalars adam;
  float clip;
  Divisor root_c2;
  uint32_t ordinary;  // groups whose largest moments have bits below it are updated by QuickGroup

  __device__ StepScalars(const AdamScalars& scalars, float clip) : adam(scalars), clip(clip), root_c2(scalars.root_c2) {
    const bool divides = scalars.root_c2 >= 0x1p-10f && scalars.root_c2 <= 2.0f;
    ordinary = divides && scalars.eps >= 0x1p-60f && scalars.eps <= 1.0f ? __float_as_uint(kOrdinaryMost) : 0;
    // Kept in a register: computed again for each group it would take ten instructions.
    asm volatile("" : "+r"(ordinary));
  }

  // Of a largest moment, or NaN.
  __device__ bool is_ordinary(float largest) const { return __float_as_uint(largest) < ordinary; }
};

// The new master by fresh moments.
__device__ inline float stepped(const Updated& x, const AdamScalars& s) {
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(x.v), s.root_c2), s.eps);
  return __fsub_rn(x.p, __fmul_rn(s.step_size, __fdiv_rn(x.m, denominator)));
}

// Codes of a group by its scales, as they are defined.
class ExactGroup {
 public:
  __device__ ExactGroup(float first_scale, float second_scale, const CodeValues& values)
      : first_scale_(first_scale), second_scale_(second_scale), values_(values) {}

  // The bits of the code of m.
  __device__ uint32_t first(float m) const {
    if (!(first_scale_ > 0.0f)) return 0;
    const float size = fminf(fmaxf(fabsf(m), 0.0f), first_scale_);  // 0 for NaN
    const float ratio = __fdiv_rn(size, first_scale_);
    const int guess = static_cast<int>(254.0f * ratio * approximate_reciprocal(1.0f + ratio));
    const Around at = around(values_.first, smaller(guess, 127), 127, size, first_scale_);
    const int code = at.code + (__fsub_rn(size, at.low) > __fsub_rn(at.high, size));
    return static_cast<uint32_t>(m < 0.0f ? -code : code) & 0xFFu;
  }

  // The code of v with random bits, of which the upper 24 count.
  __device__ uint32_t second(float v, uint32_t random) const {
    const float size = fminf(fmaxf(v, 0.0f), second_scale_);  // 0 for NaN
    if (!(size > 0.0f)) return 0;
    const float place = 259.0f * approximate_root(approximate_root(__fdiv_rn(size, second_scale_))) - 4.0f;
    const Around at = around(values_.second, smaller(static_cast<int>(fmaxf(place, 0.0f)), 255), 255, size, second_scale_);
    const float low = __fsqrt_rn(at.low), high = __fsqrt_rn(at.high);
    const float share = __fmul_rn(__uint2float_rn(random >> 8), 0x1p-24f);
    const int code = at.code + (__fsub_rn(__fsqrt_rn(size), low) > __fmul_rn(share, __fsub_rn(high, low)));
    return static_cast<uint32_t>(larger(code, 1));
  }

 private:
  // The largest code whose value is at most `size`, that value, and the value of the next code.
  struct Around {
    int code;
    float low, high;
  };

  // `guess` errs by one at most.
  __device__ static Around around(const float* values, int guess, int last, float size, float scale) {
    guess -= __fmul_rn(values[guess], scale) > size;
    guess += guess < last && __fmul_rn(values[guess + 1], scale) <= size;
    return {guess, __fmul_rn(values[guess], scale), __fmul_rn(values[guess + 1], scale)};
  }

  const float first_scale_, second_scale_;
  const CodeValues& values_;
};

// The scales of a group, or its largest moments.
struct GroupPair {
  float first, second;
};

// The update of a group whose largest moments are those of an ordinary group, by its scales.
//
// Places of codes are fixed-point numbers: byte 2 of a word is the code, and the 16 bits below it are
// where the element lies between two boundaries. They are kDoubt / 2 too large, so that they are below
// kDoubt where the code may be wrong.
class QuickGroup {
 public:
  __device__ explicit QuickGroup(const GroupPair& scales)
      : first_inverse_(approximate_reciprocal(scales.first)),
        square_factor_(67081.0f * approximate_inverse_root(scales.second)) {}

  // In units of 2**-16 of the distance between codes. What is rounded on the way to a place, the
  // approximate instructions by 2**-22.9 of their results at most, moves it by less than half of it.
  static constexpr uint32_t kDoubt = 16;

  // The new master, and the places of the codes of the size of m and of v.
  struct Result {
    float p;
    uint32_t first, second;
  };

  // The upper 16 bits of `complement` are those of the complement of the random bits.
  __device__ Result update(const Updated& x, const StepScalars& s, uint32_t complement) const {
    const float root = ordinary_root(x.v);
    const float denominator = __fadd_rn(s.root_c2.divide(root), s.adam.eps);
    const float p = __fsub_rn(x.p, __fmul_rn(s.adam.step_size, Divisor(denominator).divide(x.m)));
    return {p, first_place(x.m), second_place(root, complement)};
  }

 private:
  static constexpr float kMargin = kDoubt / 2 * 0x1p-16f;

  // With x = 1 + |m| / scale the middle between the values of codes c and c + 1 is where
  // 127 / x + sqrt((127 / x)**2 + 1 / 4) is 253.5 - c. The hyperbola below errs by 1.1 * 2**-16 at most
  // from that. The sum is in [128, 256), where the last bit of a float is 2**-16.
  __device__ uint32_t first_place(float m) const {
    const float x = __fmaf_rn(fabsf(m), first_inverse_, 0x1.fffe9cp-1f);
    return static_cast<uint32_t>(bits_of(__fmaf_rn(approximate_reciprocal(x), -0x1.fbfcf2p+7f, 382.49573385f + kMargin)));
  }

  // In units of 1/67081 the root of the value of code c is (c + 4)**2, and v is rounded up from n**2 if
  // (root - n**2) / (2 n + 1) > r, r being random: if n < sqrt(root - r (1 - r)) - r. So c + 3 is that
  // number rounded down. The smallest code is 1, and everything below 1.5 becomes it. The sum is in
  // [256, 512), where the last bit of a float is 2**-15.
  __device__ uint32_t second_place(float root, uint32_t complement) const {
    const uint32_t share = (complement >> 16) + 0x43000000u;  // 129 - r, as a float
    const float centred = __fadd_rn(float_of(static_cast<int32_t>(share)), -128.5f);
    const float square = __fmaf_rn(centred, centred, __fmaf_rn(root, square_factor_, -0.25f));
    const float sum = __fadd_rn(approximate_root(square), 252.0f + kMargin);
    constexpr uint32_t kCode0 = 2 * 0x43800000u + 0x43000000u;
    return max(2 * static_cast<uint32_t>(bits_of(sum)) + share, kCode0 + 0x18000u);
  }

  const float first_inverse_, square_factor_;
};

// Byte 2 of each of four words.
__device__ inline uint32_t third_bytes(const uint32_t (&words)[4]) {
  return __byte_perm(__byte_perm(words[0], words[1], 0x62), __byte_perm(words[2], words[3], 0x62), 0x5410);
}

// The bits of a negative float's sign, in eight bits of a byte for each of four.
__device__ inline uint32_t sign_bytes(float a, float b, float c, float d) {
  const auto signs = [](float x, float y) {
    uint32_t two;
    asm("prmt.b32 %0, %1, %2, 0xFB;" : "=r"(two) : "r"(__float_as_uint(x)), "r"(__float_as_uint(y)));
    return two;
  };
  return __byte_perm(signs(a, b), signs(c, d), 0x5410);
}

// Negates the bytes below 128 whose bits are set in `signs`.
__device__ inline uint32_t negate_bytes(uint32_t bytes, uint32_t signs) {
  const uint32_t sum = ((bytes ^ signs) & 0x7F7F7F7Fu) + (signs & 0x01010101u);
  return sum ^ (signs & 0x80808080u);
}

// The least of the lower halves of three words, in the lower half.
__device__ inline uint32_t least_half(uint32_t a, uint32_t b, uint32_t c) {
#if __CUDA_ARCH__ >= 900
  return __vimin3_u16x2(a, b, c);
#else
  return min(min(a & 0xFFFFu, b & 0xFFFFu), c & 0xFFFFu);
#endif
}

// The greater of two numbers that are not negative, or NaN if one is.
__device__ inline float greater_or_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

}  // namespace zerocast::cuda
