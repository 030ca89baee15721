// AdamW on a few elements in registers, in the order of f32 operations that
// zerocast/backends/README.md fixes, none contracted.
#pragma once

#include "codec.h"
#include "cuda/panel.cuh"
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

// The four arrays of one optimizer state, at element 0 of a weight or of a flat shard.
template <class Grad, class Moment>
struct AdamArrays {
  uint64_t master, grad, exp_avg, exp_avg_sq;

  __device__ uint32_t* words(int64_t e) const { return reinterpret_cast<uint32_t*>(master) + e; }
  __device__ float* p(int64_t e) const { return reinterpret_cast<float*>(master) + e; }
  __device__ const typename Grad::Word* g(int64_t e) const { return reinterpret_cast<const typename Grad::Word*>(grad) + e; }
  __device__ typename Moment::Word* m(int64_t e) const { return reinterpret_cast<typename Moment::Word*>(exp_avg) + e; }
  __device__ typename Moment::Word* v(int64_t e) const { return reinterpret_cast<typename Moment::Word*>(exp_avg_sq) + e; }

  // True if four elements from `e`, and from any multiple of four further, are aligned in all
  // arrays.
  __device__ bool aligned(int64_t e) const {
    const auto off = [](const void* at, int bytes) { return reinterpret_cast<uint64_t>(at) % bytes; };
    constexpr int kGrad = 4 * sizeof(typename Grad::Word), kMoment = 4 * sizeof(typename Moment::Word);
    return (off(p(e), 16) | off(g(e), kGrad) | off(m(e), kMoment) | off(v(e), kMoment)) == 0;
  }

  // Loads four elements from an aligned position, all in flight at once.
  struct Loaded {
    Four<Float32> p;
    Four<Grad> g;
    Four<Moment> m, v;
  };

  __device__ Loaded load(int64_t e) const {
    return {Four<Float32>::load(words(e)), Four<Grad>::load(g(e)), Four<Moment>::load(m(e)), Four<Moment>::load(v(e))};
  }

  // Updates and stores them; returns the new masters.
  __device__ void finish(int64_t e, Loaded x, const AdamScalars& s, float clip, float (&masters)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float m1 = x.m[i], v1 = x.v[i];
      masters[i] = x.p[i];
      adamw(masters[i], x.g[i], m1, v1, s, clip);
      x.p.words[i] = Float32::narrow(masters[i]);
      x.m.words[i] = Moment::narrow(m1);
      x.v.words[i] = Moment::narrow(v1);
    }
    x.p.store(words(e));
    x.m.store(m(e));
    x.v.store(v(e));
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
