// Stage adam_cast: AdamW over whole rows of blocks, the amaxes of the updated masters, and their
// codes, from one read.
#include "cuda/adam.cuh"
#include "cuda/one_pass.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kColumns = kOnePassShape.lane_columns, kWarps = kOnePassShape.warps, kRows = one_pass_rows(kWarps);
constexpr int kMinBlocks = 2;  // a multiprocessor: 64 registers a thread, which do not spill

// Updates the rows of a lane, keeps them, and returns the largest absolute value. `poison` as in
// `add_poison`.
template <class Nominal, class Grad, class Moment>
__device__ float update(const AdamArrays<Grad, Moment>& arrays, const OnePassLane& lane, const AdamScalars& scalars,
                        float clip, float& poison) {
  const Kept<Nominal, kWarps> kept;
  const auto element = [&](int r) { return lane.element + r * lane.pitch; };
  float most = 0.0f;
  if (lane.pitch % kColumns == 0 && lane.whole(kRows) && arrays.aligned(lane.element)) {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      float masters[kColumns];
      arrays.finish(element(r), arrays.load(element(r)), scalars, clip, masters);
      most = fmaxf(most, row_amax<kColumns>(masters));
      add_poison<kColumns>(masters, poison);
      kept.keep(r, masters);
    }
    return most;
  }
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    const OnePassLane::Owned owned = lane.owned(r);
#pragma unroll 1
    for (int c = owned.first; c < owned.last; ++c) arrays.update_one(element(r) + c, scalars, clip);
    float masters[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) masters[c] = owned.has(c) ? *arrays.p(element(r) + c) : 0.0f;
    most = fmaxf(most, row_amax<kColumns>(masters));
    add_poison<kColumns>(masters, poison);
    kept.keep(r, masters);
  }
  return most;
}

struct StateBases {
  BaseList master, grad, exp_avg, exp_avg_sq;
};

template <class Grad, class Moment, class Nominal, class E, Grid kGrid>
__global__ void __launch_bounds__(kOnePassShape.threads(), kMinBlocks)
    adam_cast_kernel(Format format, const int64_t* table, const Item* items, StateBases state, const int64_t* groups,
                     AdamInputs adam, AmaxSink out, BaseList row_data) {
  if (holds(adam.skip)) return;
  float most;
  {
    const Item item = items[blockIdx.x];
    const Weight w = weight_of(table, item);
    const AdamArrays<Grad, Moment> arrays{origin_of<Float32>(state.master, w), origin_of<Grad>(state.grad, w),
                                          origin_of<Moment>(state.exp_avg, w), origin_of<Moment>(state.exp_avg_sq, w)};
    float poison = 0.0f;
    most = update<Nominal>(arrays, one_pass_lane<kGrid, kWarps>(format, w, item), adam.rows[groups[item.weight]], *adam.clip,
                           poison);
    note_poison(w, out, poison);
  }
  const LaneAmaxes amaxes = amaxes_of_lanes<kGrid, kRows, kWarps>(most);
  const float multiplier = multiplier_of<kGrid>(format, round_to<Nominal>(amaxes.block), round_to<Nominal>(amaxes.group));
  // Found once more, so that the loop above has these registers.
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const OnePassLane lane = one_pass_lane<kGrid, kWarps>(format, w, item);
  store_amax<kGrid, kRows>(lane, threadIdx.x / kWarpLanes, w, out, amaxes.block);
  write_codes<Nominal, E, kWarps>(lane, origin_of<Float32>(state.master, w), data_of(row_data, w), multiplier);
}

}  // namespace

void adam_cast(const Format& format, Dtype nominal, const AdamState& state, const Work& work, uintptr_t groups,
               const AdamStep& step, Array packed, DeviceBases row_data, Stream stream) {
  const StateBases bases{bases_of(state.master), bases_of(state.grad.address), bases_of(state.exp_avg.address),
                         bases_of(state.exp_avg_sq.address)};
  const auto go = [&](auto kernel) {
    launch(kernel, work.blocks, kOnePassShape.threads(), stream, format, table_of(work), items_of(work), bases,
           reinterpret_cast<const int64_t*>(groups), inputs_of(step), AmaxSink{amaxes_of(packed), nominal},
           bases_of(row_data));
  };
  for_states(state, [&](auto grad, auto moment) {
    for_nominal(nominal, [&](auto rounded) {
      for_codes(format, [&](auto element, auto grid) {
        using Grad = decltype(grad);
        using Moment = decltype(moment);
        using Nominal = decltype(rounded);
        using E = decltype(element);
        constexpr Grid kGrid = decltype(grid)::value;
        return go(adam_cast_kernel<Grad, Moment, Nominal, E, kGrid>);
      });
    });
  });
}

}  // namespace zerocast::cuda
