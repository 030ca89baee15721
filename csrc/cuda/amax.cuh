// From a lane's elements to the packed amaxes of the blocks that they lie in; shared by partial_amax and adam_amax.
//
// A maximum is rounded to the nominal dtype once a block: rounding is monotone.
#pragma once

#include "cuda/panel.cuh"

namespace zerocast::cuda {

// The kinds of block grids that the kernels know: the whole tensor, 128 x 128, 16 x 16, and 1 x 32 with 32 x 1.
enum class Grid { kTensor, kSquare128, kSquare16, kRowsAndColumns };

__host__ __device__ constexpr int panel_rows(Grid grid) {
  return grid == Grid::kRowsAndColumns ? 2 * kPanelRows : kPanelRows;
}

// Where amaxes go, and what they are rounded to on the way.
struct AmaxSink {
  Amaxes packed;
  Dtype nominal;

  __device__ float rounded(float amax) const {
    if (nominal == Dtype::kBfloat16) return round_to<Bfloat16>(amax);
    return nominal == Dtype::kFloat16 ? round_to<Float16>(amax) : amax;
  }
  __device__ void store(int64_t index, float amax) const {
    if (amax > 0.0f) packed.store(index, rounded(amax));
  }
  __device__ void raise(int64_t index, float amax) const {
    if (amax > 0.0f) packed.raise(index, rounded(amax));
  }
};

using AmaxLane = Lane<kAmaxShape.lane_columns>;
using AmaxRow = Row<kAmaxShape.lane_columns>;

// Amaxes of the blocks under a panel, from its rows one after the other. All threads of a block come with every row, with zeros
// for what is not owned.
template <Grid kGrid>
class PanelAmaxes {
 public:
  __device__ PanelAmaxes(const AmaxLane& lane, const Weight& w, const AmaxSink& out) : lane_(lane), w_(w), out_(out) {}

  __device__ void row(int, const AmaxRow& x) { most_ = fmaxf(most_, row_amax<kAmaxShape.lane_columns>(x)); }

  __device__ void finish() const {
    if constexpr (kGrid == Grid::kSquare16) {  // four lanes hold a block in whole, so nobody else writes it
      const float most = greatest<4>(most_);
      if (threadIdx.x % 4 == 0) out_.store(w_[column::ROW_AMAX] + lane_.row / 16 * (lane_.columns / 16) + lane_.column / 16, most);
      return;
    }
    const float most = greatest_of_block();
    if (threadIdx.x != 0) return;
    if constexpr (kGrid == Grid::kSquare128) {  // a thread block holds a block in whole
      const int64_t across = (lane_.columns + 127) / 128;
      out_.store(w_[column::ROW_AMAX] + lane_.row / 128 * across + lane_.column / 128, most);
    } else {  // one amax of the whole tensor
      out_.raise(w_[column::ROW_AMAX], most);
    }
  }

 private:
  static_assert(kAmaxShape.width() == 128 && kAmaxShape.warps * kPanelRows == 128);

  __device__ float greatest_of_block() const {
    __shared__ float of_warp[kAmaxShape.warps];
    const float most = greatest<kWarpLanes>(most_);
    if (threadIdx.x % kWarpLanes == 0) of_warp[threadIdx.x / kWarpLanes] = most;
    __syncthreads();
    return greatest<kAmaxShape.warps>(of_warp[threadIdx.x % kAmaxShape.warps]);
  }

  const AmaxLane& lane_;
  const Weight& w_;
  const AmaxSink& out_;
  float most_ = 0.0f;
};

// Blocks of 1 x 32, eight lanes a row, and of 32 x 1, which a lane goes down.
template <>
class PanelAmaxes<Grid::kRowsAndColumns> {
 public:
  __device__ PanelAmaxes(const AmaxLane& lane, const Weight& w, const AmaxSink& out)
      : lane_(lane), w_(w), out_(out), across_(lane.columns / 32) {}

  __device__ void row(int r, const AmaxRow& x) {
    const float most = greatest<8>(row_amax<kAmaxShape.lane_columns>(x));
    if (threadIdx.x % 8 == 0) out_.store(w_[column::ROW_AMAX] + (lane_.row + r) * across_ + lane_.column / 32, most);
#pragma unroll
    for (int c = 0; c < kAmaxShape.lane_columns; ++c) columns_[c] = fmaxf(columns_[c], fabsf(x[c]));
  }

  __device__ void finish() const {
    const int64_t first = w_[column::COLUMN_AMAX] + lane_.row / 32 * lane_.columns + lane_.column;
#pragma unroll
    for (int c = 0; c < kAmaxShape.lane_columns; ++c) out_.store(first + c, columns_[c]);
  }

 private:
  const AmaxLane& lane_;
  const Weight& w_;
  const AmaxSink& out_;
  const int64_t across_;
  float columns_[kAmaxShape.lane_columns] = {};
};

}  // namespace zerocast::cuda
