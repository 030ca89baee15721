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

// Both moments, fresh, and the master of an element.
struct Updated {
  float p, m, v;
};

__device__ inline Updated fresh(float p, float g, float old_m, float old_v, const AdamScalars& s, float clip) {
  g = __fmul_rn(g, clip);
  return {p, __fadd_rn(__fmul_rn(s.beta1, old_m), __fmul_rn(s.one_minus_beta1, g)),
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

// The values that all elements of a step share.
struct StepScalars {
  AdamScalars adam;
  float clip;
  Divisor root_c2;
  float ordinary;  // below it the divisions and roots of an update are those of QuickGroup

  __device__ StepScalars(const AdamScalars& scalars, float clip) : adam(scalars), clip(clip), root_c2(scalars.root_c2) {
    const bool divides = scalars.root_c2 >= 0x1p-30f && scalars.root_c2 <= 2.0f;
    ordinary = divides && scalars.eps >= 0x1p-60f && scalars.eps <= 1.0f ? 0x1p62f : 0.0f;
  }
};

// The new master by fresh moments.
__device__ inline float stepped(const Updated& x, const AdamScalars& s) {
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(x.v), s.root_c2), s.eps);
  return __fsub_rn(__fmul_rn(x.p, s.decay), __fmul_rn(s.step_size, __fdiv_rn(x.m, denominator)));
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

// The update of a group whose largest moments are below `StepScalars::ordinary`, by its scales.
class QuickGroup {
 public:
  __device__ QuickGroup(float first_scale, float second_scale)
      : first_inverse_(approximate_reciprocal(first_scale)),
        root_inverse_(67081.0f * approximate_inverse_root(second_scale)) {}

  // The new master, the codes of the moments, and whether all of this may be wrong.
  struct Result {
    float p;
    uint32_t first, second;
    bool doubtful;
  };

  __device__ Result update(const Updated& x, const StepScalars& s, uint32_t random) const {
    const float root = ordinary_root(x.v);
    const float denominator = __fadd_rn(s.root_c2.divide(root), s.adam.eps);
    const float p = __fsub_rn(__fmul_rn(x.p, s.adam.decay), __fmul_rn(s.adam.step_size, Divisor(denominator).divide(x.m)));
    const Code first = first_code(x.m), second = second_code(root, random);
    const bool is_small = !(fabsf(x.m) >= 0x1p-90f) || !(x.v >= 0x1p-100f);
    return {p, first.bits, second.bits, is_small || first.doubtful || second.doubtful};
  }

 private:
  // In units of the distance between codes. Rounding, by at most 2**-22.9 of the results of
  // approximate instructions, moves the position of a code by less than 0.00009.
  static constexpr float kDoubt = 0x1p-13f;

  struct Code {
    uint32_t bits;
    bool doubtful;
  };

  // The inverse of M is 254 t / (1 + t). The middle between the values of two codes lies
  // 1 / (4 (254 - c)) = (1 + t) / 1016 above that of their places.
  __device__ Code first_code(float m) const {
    const float t1 = __fmaf_rn(fabsf(m), first_inverse_, 1.0f), t254 = __fmul_rn(fabsf(m), 254.0f * first_inverse_);
    const float place = copysignf(__fmaf_rn(t254, approximate_reciprocal(t1), __fmul_rn(t1, -1.0f / 1016.0f)), m);
    const float sum = __fadd_rn(place, 0x1.8p23f);
    return {static_cast<uint32_t>(bits_of(sum)) & 0xFFu, fabsf(__fsub_rn(place, __fsub_rn(sum, 0x1.8p23f))) > 0.5f - kDoubt};
  }

  // In units of 1/67081 the root of the value of code c is (c + 4)**2: between two of them the place
  // is linear in the root, and rounding at random is rounding up after a random number is taken off.
  // The smallest code is 1.
  __device__ Code second_code(float root, uint32_t random) const {
    const float square = __fmul_rn(root, root_inverse_);
    const float n = __fsub_rn(__fadd_rd(approximate_root(square), 0x1p23f), 0x1p23f);
    const float part = __fmaf_rn(-n, n, square) * approximate_reciprocal(__fmaf_rn(2.0f, n, 1.0f));
    const float place = fmaxf(__fmaf_rn(__uint2float_rn(random >> 8), -0x1p-24f, __fadd_rn(n, part)), 4.5f);
    const float sum = __fadd_ru(place, 0x1p23f);
    const float rest = __fsub_rn(__fsub_rn(sum, 0x1p23f), place);
    return {static_cast<uint32_t>(bits_of(sum)) - 0x4B000004u, fabsf(__fsub_rn(rest, 0.5f)) > 0.5f - kDoubt};
  }

  const float first_inverse_, root_inverse_;
};

}  // namespace zerocast::cuda
