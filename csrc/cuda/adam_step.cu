// Stage adam_step: AdamW on flat shards, all segments in one launch.
#include "cuda/adam.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPieces = 4;  // pieces of four elements per thread
constexpr int kAtOnce = 1;  // pieces whose loads are in flight together

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
  const auto at = [&](int piece) { return first + (piece * kThreads + static_cast<int>(threadIdx.x)) * 4; };
  if (aligned && first + kSegmentElements <= segment.numel) {
    typename AdamArrays<Grad, Moment>::Loaded loaded[kAtOnce];
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) loaded[i] = arrays.load(segment.offset + at(piece + i));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float masters[4];
        arrays.finish(segment.offset + at(piece + i), loaded[i], s, clip, masters);
      }
    }
    return;
  }
#pragma unroll 1
  for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll 1
    for (int64_t i = at(piece); i < min(at(piece) + 4, segment.numel); ++i) arrays.update_one(segment.offset + i, s, clip);
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
