// Shared by the Adam stages: a row of scalars, and the loop that updates a run of elements.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/panels.h"
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

// The loop of adam.inc for the dtypes of gradients and moments.
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

// Updates the owned elements of a row of a panel, as amax_walk.h does before it folds them. `states`
// are indexed by MASTER_BASE, `groups` by the rows of the table.
struct RowUpdate {
  AdamLoop update;
  const std::vector<AdamState>& states;
  const Table& table;
  const int64_t* groups;
  const AdamScalars* scalars;
  float clip;

  void operator()(const Panel& panel, int64_t row, Panel::Segment owned) const {
    if (owned.first >= owned.last) return;
    const Weight& weight = panel.weight;
    const int64_t element = row * panel.pitch + owned.first - weight.start();
    const int64_t group = groups[(weight.row - table.rows) / column::WIDTH];
    update_run(update, states[weight[column::MASTER_BASE]], weight[column::MASTER_OFFSET] + element,
               owned.last - owned.first, scalars[group], clip);
  }
};

inline std::vector<Array> masters_of(const std::vector<AdamState>& states) {
  std::vector<Array> masters;
  for (const AdamState& state : states) masters.push_back({state.master, Dtype::kFloat32});
  return masters;
}

}  // namespace zerocast
