// Shared by the two Adam stages: a row of scalars, and the loop that updates a run of elements.
#pragma once

#include <cstdint>

#include "descriptor.h"

namespace zerocast {

// One row of `scalars`, in the order of zerocast/backends/README.md.
struct AdamScalars {
  float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_c2, eps;
};
static_assert(sizeof(AdamScalars) == 8 * sizeof(float));

// Flat tensors that are updated together.
struct AdamState {
  uintptr_t master;
  Array grad, exp_avg, exp_avg_sq;  // both moments of one dtype
};

// The loop of adam_step.inc for the dtypes of gradients and moments.
using AdamLoop = void (*)(float* master, const void* grad, void* exp_avg, void* exp_avg_sq, int64_t n,
                          const AdamScalars& scalars, float clip);

// Updates elements [offset, offset + n).
inline void update_run(AdamLoop update, const AdamState& state, int64_t offset, int64_t n, const AdamScalars& scalars,
                       float clip) {
  const auto at = [offset](const Array& array) {
    return reinterpret_cast<void*>(array.address + offset * size_of(array.dtype));
  };
  update(reinterpret_cast<float*>(state.master) + offset, at(state.grad), at(state.exp_avg), at(state.exp_avg_sq), n,
         scalars, clip);
}

}  // namespace zerocast
