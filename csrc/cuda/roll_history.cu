// Stage roll_history: the amax history of delayed scaling (docs/formats/fp8_delayed.md), one thread
// block a weight.
#include <cmath>

#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kRollThreads = 256;

struct History {
  BaseList amaxes, scales, histories;
};

// Shifts the history down by one in pieces from left to right; each is read before it is written.
__global__ void roll_kernel(Format format, float numerator, const int64_t* table, History at, const bool* skip) {
  if (holds(skip)) return;
  const Weight w{table + static_cast<int64_t>(blockIdx.x) * column::WIDTH};
  const float amax = *at.amaxes.at<const float>(w, column::AMAX_BASE, column::AMAX_OFFSET);
  float* scale = at.scales.at<float>(w, column::SCALE_BASE, column::SCALE_OFFSET);
  float* history = at.histories.at<float>(w, column::HISTORY_BASE, column::HISTORY_OFFSET);
  const int64_t length = format.amax_history_len;
  const float last = amax != 0.0f ? amax : history[0];
  if (last == 0.0f) return;
  __shared__ float of_warp[kWarpLanes];
  float most = 0.0f;
  for (int64_t first = 0; first < length; first += kRollThreads) {
    const int64_t i = first + threadIdx.x;
    const float next = i + 1 < length ? history[i + 1] : last;
    __syncthreads();
    if (i < length) {
      history[i] = i == 0 ? 0.0f : next;
      most = fmaxf(most, next);
    }
  }
  most = greatest<kWarpLanes>(most);
  if (threadIdx.x % kWarpLanes == 0) of_warp[threadIdx.x / kWarpLanes] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kRollThreads / kWarpLanes; ++i) most = fmaxf(most, of_warp[i]);
  *scale = delayed_scale(format.most_recent ? last : most, numerator, *scale);
}

}  // namespace

void roll_history(const Format& format, const Work& work, DeviceBases amaxes, DeviceBases scales, DeviceBases histories,
                  Flag skip, Stream stream) {
  const float numerator = std::ldexp(format.fp8_max(), -format.margin);
  const History at{bases_of(amaxes), bases_of(scales), bases_of(histories)};
  launch(roll_kernel, work.weights, kRollThreads, stream, format, numerator, table_of(work), at, flag_of(skip));
}

}  // namespace zerocast::cuda
