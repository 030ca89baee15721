// Stage adam_step: AdamW on flat shards, all segments in one launch.
#include "cuda/adam.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPieces = 4;  // of four elements, a thread

struct Segment {
  int64_t offset, numel, scalars;
};

template <class Grad, class Moment>
__global__ void __launch_bounds__(kThreads)
    adam_kernel(AdamArrays<Grad, Moment> arrays, const Segment* segments, const Item* items, AdamInputs adam) {
  if (holds(adam.skip)) return;
  const Item item = items[blockIdx.x];
  const Segment segment = segments[item.weight];
  const AdamScalars s = adam.rows[segment.scalars];
  const float clip = *adam.clip;
  const int64_t first = static_cast<int64_t>(item.ordinal) * kSegmentElements;
  const bool aligned = arrays.aligned(segment.offset + first);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int64_t i = first + (piece * kThreads + static_cast<int>(threadIdx.x)) * 4;
    const int64_t e = segment.offset + i;
    if (aligned && i + 4 <= segment.numel) {
      auto x = arrays.load(e);
      arrays.finish(e, x, s, clip);
    } else {
      for (int k = 0; k < 4 && i + k < segment.numel; ++k) arrays.update_one(e + k, s, clip);
    }
  }
}
static_assert(kSegmentElements == kThreads * kPieces * 4);

}  // namespace

void adam_step(const AdamState& state, uintptr_t segments, uintptr_t items, int64_t blocks, const AdamStep& step,
               Stream stream) {
  for_states(state, [&](auto grad, auto moment) {
    using Arrays = AdamArrays<decltype(grad), decltype(moment)>;
    const Arrays arrays{state.master, state.grad.address, state.exp_avg.address, state.exp_avg_sq.address};
    launch(adam_kernel<decltype(grad), decltype(moment)>, blocks, kThreads, stream, arrays,
           reinterpret_cast<const Segment*>(segments), reinterpret_cast<const Item*>(items), inputs_of(step));
  });
}

}  // namespace zerocast::cuda
