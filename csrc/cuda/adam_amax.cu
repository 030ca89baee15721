// Stage adam_amax: the update of adam_step over the owned spans of a table, and in the same pass the partial amaxes of the
// updated masters.
#include "cuda/adam.cuh"
#include "cuda/amax.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kRowsAtOnce = 2;  // whose four arrays are on their way together

// Updates rows of a lane and brings the new masters.
template <class Grad, class Moment>
struct Updater {
  using Arrays = AdamArrays<Grad, Moment>;
  Arrays arrays;
  AdamScalars scalars;
  float clip;

  __device__ bool fast(const Lane& lane) const {
    return lane.pitch % 4 == 0 && lane.whole(0, 0) && arrays.aligned(lane.element);
  }

  __device__ void whole_rows(int64_t element, int64_t pitch, Row (&x)[kRowsAtOnce]) const {
    typename Arrays::Loaded loaded[kRowsAtOnce][2];
#pragma unroll
    for (int i = 0; i < 2 * kRowsAtOnce; ++i) loaded[i / 2][i % 2] = arrays.load(element + i / 2 * pitch + i % 2 * 4);
#pragma unroll
    for (int i = 0; i < 2 * kRowsAtOnce; ++i) {
      arrays.finish(element + i / 2 * pitch + i % 2 * 4, loaded[i / 2][i % 2], scalars, clip);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[i / 2][i % 2 * 4 + c] = loaded[i / 2][i % 2].p[c];
    }
  }

  // Element by element, then read again: registers are not indexed in a loop.
  __device__ void owned_rows(const Lane& lane, int first, Row (&x)[kRowsAtOnce]) const {
#pragma unroll 1
    for (int i = 0; i < kRowsAtOnce * kLaneColumns; ++i) {
      const int r = first + i / kLaneColumns, c = i % kLaneColumns;
      if (lane.owns(r, c)) arrays.update_one(lane.element + r * lane.pitch + c, scalars, clip);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce * kLaneColumns; ++i) {
      const int r = first + i / kLaneColumns, c = i % kLaneColumns;
      x[i / kLaneColumns][c] = lane.owns(r, c) ? *arrays.p(lane.element + r * lane.pitch + c) : 0.0f;
    }
  }
};

struct StateBases {
  BaseList master, grad, exp_avg, exp_avg_sq;
};

template <class Grad, class Moment, Grid kGrid>
__global__ void __launch_bounds__(kPanelThreads)
    adam_amax_kernel(Format format, const int64_t* table, const Item* items, StateBases state, const int64_t* groups,
                     AdamInputs adam, AmaxSink out) {
  if (holds(adam.skip)) return;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  Lane lane;
  if (!find_lane(panel_grid(format, w), w, item.ordinal, panel_rows(format), lane)) return;
  const Updater<Grad, Moment> update{{origin_of<Float32>(state.master, w), origin_of<Grad>(state.grad, w),
                                      origin_of<Moment>(state.exp_avg, w), origin_of<Moment>(state.exp_avg_sq, w)},
                                     adam.rows[groups[item.weight]],
                                     *adam.clip};
  PanelAmaxes<kGrid> amaxes(lane, w, format, out);
  const bool first_half = update.fast(lane), second_half = update.fast(down(lane, panel_rows(kGrid) - kPanelRows));
#pragma unroll 1
  for (int r = 0; r < panel_rows(kGrid); r += kRowsAtOnce) {
    Row x[kRowsAtOnce];
    if (r < kPanelRows ? first_half : second_half) {
      update.whole_rows(lane.element + r * lane.pitch, lane.pitch, x);
    } else {
      update.owned_rows(lane, r, x);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) amaxes.row(r + i, x[i]);
  }
  amaxes.finish();
}

}  // namespace

void adam_amax(const Format& format, Dtype nominal, const AdamState& state, const Work& work, uintptr_t groups,
               const AdamStep& step, Array packed, Stream stream) {
  const StateBases bases{bases_of(state.master), bases_of(state.grad.address), bases_of(state.exp_avg.address),
                         bases_of(state.exp_avg_sq.address)};
  for_states(state, [&](auto grad, auto moment) {
    for_grid(format, [&](auto grid) {
      launch(adam_amax_kernel<decltype(grad), decltype(moment), decltype(grid)::value>, work.blocks, kPanelThreads, stream,
             format, table_of(work), items_of(work), bases, reinterpret_cast<const int64_t*>(groups), inputs_of(step),
             AmaxSink{amaxes_of(packed), nominal});
    });
  });
}

}  // namespace zerocast::cuda
