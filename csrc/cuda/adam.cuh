// AdamW on a few elements in registers: single f32 operations in the order that the design fixes, none contracted.
#pragma once

#include "codec.h"
#include "cuda/memory.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {

// One row of `scalars`, in the order of zerocast/backends/README.md.
struct AdamScalars {
  float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_c2, eps;
};
static_assert(sizeof(AdamScalars) == 8 * sizeof(float));

struct AdamInputs {
  const AdamScalars* rows;
  const float* clip;
  const bool* skip;
};

__device__ inline void adamw(float& p, float g, float& m, float& v, const AdamScalars& s, float clip) {
  g = __fmul_rn(g, clip);
  m = __fadd_rn(__fmul_rn(s.beta1, m), __fmul_rn(s.one_minus_beta1, g));
  v = __fadd_rn(__fmul_rn(s.beta2, v), __fmul_rn(__fmul_rn(s.one_minus_beta2, g), g));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root_c2), s.eps);
  p = __fsub_rn(__fmul_rn(p, s.decay), __fmul_rn(s.step_size, __fdiv_rn(m, denominator)));
}

inline AdamInputs inputs_of(const AdamStep& step) {
  return {reinterpret_cast<const AdamScalars*>(step.scalars), reinterpret_cast<const float*>(step.clip),
          reinterpret_cast<const bool*>(step.skip)};
}

// Four elements from an address that is aligned to them.
template <class Storage>
struct Four {
  using Word = typename Storage::Word;
  struct alignas(4 * sizeof(Word)) Words {
    Word at[4];
  };

  __device__ static void load(const Word* at, float (&x)[4]) {
    Words words;
    if constexpr (sizeof(Word) == 4) {
      const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(at));
      memcpy(&words, &bits, sizeof bits);
    } else {
      const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(at));
      memcpy(&words, &bits, sizeof bits);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = Storage::widen(words.at[i]);
  }

  __device__ static void store(Word* at, const float (&x)[4]) {
    Words words;
#pragma unroll
    for (int i = 0; i < 4; ++i) words.at[i] = Storage::narrow(x[i]);
    if constexpr (sizeof(Word) == 4) {
      uint4 bits;
      memcpy(&bits, &words, sizeof bits);
      __stcs(reinterpret_cast<uint4*>(at), bits);
    } else {
      uint2 bits;
      memcpy(&bits, &words, sizeof bits);
      __stcs(reinterpret_cast<uint2*>(at), bits);
    }
  }
};

// The four arrays of one optimizer state, from element 0 of a weight or of a flat shard on.
template <class Grad, class Moment>
struct AdamArrays {
  uint64_t master, grad, exp_avg, exp_avg_sq;

  __device__ float* p(int64_t e) const { return reinterpret_cast<float*>(master) + e; }
  __device__ const typename Grad::Word* g(int64_t e) const { return reinterpret_cast<const typename Grad::Word*>(grad) + e; }
  __device__ typename Moment::Word* m(int64_t e) const { return reinterpret_cast<typename Moment::Word*>(exp_avg) + e; }
  __device__ typename Moment::Word* v(int64_t e) const { return reinterpret_cast<typename Moment::Word*>(exp_avg_sq) + e; }

  // Whether four elements from `e` on, and all that lie a multiple of four further, are aligned in all arrays.
  __device__ bool aligned(int64_t e) const {
    const auto off = [](const void* at, int bytes) { return reinterpret_cast<uint64_t>(at) % bytes; };
    constexpr int kGrad = 4 * sizeof(typename Grad::Word), kMoment = 4 * sizeof(typename Moment::Word);
    return (off(p(e), 16) | off(g(e), kGrad) | off(m(e), kMoment) | off(v(e), kMoment)) == 0;
  }

  struct Loaded {
    float p[4], g[4], m[4], v[4];
  };

  __device__ Loaded load(int64_t e) const {
    Loaded x;
    Four<Float32>::load(reinterpret_cast<const uint32_t*>(p(e)), x.p);
    Four<Grad>::load(g(e), x.g);
    Four<Moment>::load(m(e), x.m);
    Four<Moment>::load(v(e), x.v);
    return x;
  }

  __device__ void finish(int64_t e, Loaded& x, const AdamScalars& s, float clip) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) adamw(x.p[i], x.g[i], x.m[i], x.v[i], s, clip);
    Four<Float32>::store(reinterpret_cast<uint32_t*>(p(e)), x.p);
    Four<Moment>::store(m(e), x.m);
    Four<Moment>::store(v(e), x.v);
  }

  __device__ void update_one(int64_t e, const AdamScalars& s, float clip) const {
    float x = *p(e), m1 = Moment::widen(*m(e)), v1 = Moment::widen(*v(e));
    adamw(x, Grad::widen(*g(e)), m1, v1, s, clip);
    *p(e) = x;
    *m(e) = Moment::narrow(m1);
    *v(e) = Moment::narrow(v1);
  }
};

}  // namespace zerocast::cuda
