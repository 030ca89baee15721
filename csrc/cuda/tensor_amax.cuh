// The tensor amax of two-level scales: one launch stores partial maxima of the amaxes of each weight,
// and every warp of the launch that follows reduces them itself.
#pragma once

#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {

static __global__ void partial_maxima_kernel(Format format, const int64_t* table, Amaxes packed, float* partial) {
  const Weight w{table + static_cast<int64_t>(blockIdx.x) / kPartialAmaxes * column::WIDTH};
  const GridShape grid = grid_shape(format.block, w.rows(), w.columns());
  const int64_t count = grid.down * grid.across, first = w[column::ROW_AMAX];
  const int64_t step = static_cast<int64_t>(kPartialAmaxes) * blockDim.x;
  const int64_t shared = w[column::SHARED_AMAX];
  float most = shared >= 0 ? packed.load(shared) : 0.0f;
#pragma unroll 4
  for (int64_t i = blockIdx.x % kPartialAmaxes * blockDim.x + threadIdx.x; i < count; i += step) {
    most = fmaxf(most, packed.load(first + i));
  }
  __shared__ float of_warp[kWarpLanes];
  most = greatest<kWarpLanes>(most);
  if (threadIdx.x % kWarpLanes == 0) of_warp[threadIdx.x / kWarpLanes] = most;
  __syncthreads();
  if (threadIdx.x >= kWarpLanes) return;
  most = greatest<kWarpLanes>(threadIdx.x < blockDim.x / kWarpLanes ? of_warp[threadIdx.x] : 0.0f);
  if (threadIdx.x == 0) partial[blockIdx.x] = most;
}

inline void launch_partial_maxima(const Format& format, Array packed, const Work& work, uintptr_t partial, Stream stream) {
  launch(partial_maxima_kernel, work.weights * kPartialAmaxes, kScaleThreads, stream, format, table_of(work),
         amaxes_of(packed), reinterpret_cast<float*>(partial));
}

// All lanes of a warp call it together.
__device__ inline float tensor_amax_of(const float* partial, int64_t weight) {
  return greatest<kPartialAmaxes>(partial[weight * kPartialAmaxes + threadIdx.x % kPartialAmaxes]);
}

}  // namespace zerocast::cuda
