// Stage adam_amax: AdamW over the owned spans of a table and, in the same pass, the partial amaxes
// of the updated masters.
#include "cuda/adam.cuh"
#include "cuda/amax.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kAtOnce = 4;  // rows whose loads are in flight together

// Updates rows of a lane and returns the new masters.
template <class Grad, class Moment>
class Updater {
 public:
  using Arrays = AdamArrays<Grad, Moment>;

  __device__ Updater(const Arrays& arrays, const AmaxLane& lane, int height, const AdamScalars& scalars, float clip)
      : arrays_(arrays),
        lane_(lane),
        scalars_(scalars),
        clip_(clip),
        whole_(lane.pitch % 4 == 0 && lane.whole(height) && arrays.aligned(lane.element)) {}

  __device__ void update(int first, AmaxElements& x) const {
    if (whole_) {
#pragma unroll
      for (int i = 0; i < kAmaxRows; i += kAtOnce) {
        typename Arrays::Loaded loaded[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) loaded[k] = arrays_.load(element(first + i + k));
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) arrays_.finish(element(first + i + k), loaded[k], scalars_, clip_, x[i + k]);
      }
      return;
    }
    // One element at a time, then read again, since registers cannot be indexed in a loop.
#pragma unroll 1
    for (int i = 0; i < kAmaxRows * kAmaxShape.lane_columns; ++i) {
      const int r = first + i / kAmaxShape.lane_columns, c = i % kAmaxShape.lane_columns;
      if (lane_.owned(r).has(c)) arrays_.update_one(element(r) + c, scalars_, clip_);
    }
#pragma unroll
    for (int i = 0; i < kAmaxRows; ++i) {
      const AmaxLane::Owned owned = lane_.owned(first + i);
#pragma unroll
      for (int c = 0; c < kAmaxShape.lane_columns; ++c) {
        x[i][c] = owned.has(c) ? *arrays_.p(element(first + i) + c) : 0.0f;
      }
    }
  }

 private:
  __device__ int64_t element(int r) const { return lane_.element + r * lane_.pitch; }

  const Arrays arrays_;
  const AmaxLane& lane_;
  const AdamScalars scalars_;
  const float clip_;
  const bool whole_;
};

struct StateBases {
  BaseList master, grad, exp_avg, exp_avg_sq;
};

template <class Grad, class Moment, Grid kGrid>
__global__ void __launch_bounds__(kAmaxShape.threads())
    adam_amax_kernel(Format format, const int64_t* table, const Item* items, StateBases state, const int64_t* groups,
                     AdamInputs adam, AmaxSink out) {
  if (holds(adam.skip)) return;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const AmaxLane lane = find_lane<kAmaxShape.lane_columns>(panel_grid(known<kGrid>(format), w, kAmaxShape), w, item.ordinal,
                                                           panel_rows(kGrid), kAmaxShape.warps);
  const AdamArrays<Grad, Moment> arrays{origin_of<Float32>(state.master, w), origin_of<Grad>(state.grad, w),
                                        origin_of<Moment>(state.exp_avg, w), origin_of<Moment>(state.exp_avg_sq, w)};
  const Updater<Grad, Moment> updater(arrays, lane, panel_rows(kGrid), adam.rows[groups[item.weight]], *adam.clip);
  const AmaxPlace place{lane, w, out};
  PanelAmaxes<kGrid> amaxes;
#pragma unroll 1
  for (int first = 0; first < panel_rows(kGrid); first += kAmaxRows) {
    AmaxElements x;
    updater.update(first, x);
    amaxes.rows(place, first, x);
  }
  amaxes.finish(place);
}

}  // namespace

void adam_amax(const Format& format, Dtype nominal, const AdamState& state, const Work& work, uintptr_t groups,
               const AdamStep& step, Array packed, Stream stream) {
  const StateBases bases{bases_of(state.master), bases_of(state.grad.address), bases_of(state.exp_avg.address),
                         bases_of(state.exp_avg_sq.address)};
  for_states(state, [&](auto grad, auto moment) {
    for_grid(format, [&](auto grid) {
      launch(adam_amax_kernel<decltype(grad), decltype(moment), decltype(grid)::value>, work.blocks, kAmaxShape.threads(),
             stream, format, table_of(work), items_of(work), bases, reinterpret_cast<const int64_t*>(groups),
             inputs_of(step), AmaxSink{amaxes_of(packed), nominal});
    });
  });
}

}  // namespace zerocast::cuda
