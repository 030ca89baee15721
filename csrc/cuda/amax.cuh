// From a lane's elements to the packed amaxes of the blocks that they lie in; shared by partial_amax and adam_amax.
//
// A maximum is rounded to the nominal dtype once a block: rounding is monotone.
#pragma once

#include "cuda/panel.cuh"

namespace zerocast::cuda {

enum class Grid { kTensor, kLarge, kSquare16, kRowsAndColumns };

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

// Amaxes of the blocks under a panel, from its rows one after the other. All lanes of a warp come with every row, with zeros
// for what is not owned.
template <Grid kGrid>
class PanelAmaxes {
 public:
  __device__ PanelAmaxes(const Lane& lane, const Weight& w, const Format& format, const AmaxSink& out)
      : lane_(lane), w_(w), block_(format.block), out_(out) {}

  __device__ void row(int r, const Row& x) { most_ = fmaxf(most_, row_amax(x)); }

  __device__ void finish() {
    if constexpr (kGrid == Grid::kTensor) {  // one amax of the whole tensor
      put<kWarpLanes, true>(0);
    } else if constexpr (kGrid == Grid::kLarge) {  // half a warp lies in one block, and several panels
      const int64_t across = (lane_.columns + block_.columns - 1) / block_.columns;
      put<16, true>(lane_.row / block_.rows * across + lane_.column / block_.columns);
    } else {  // two lanes hold a block in whole, so nobody else writes it
      put<2, false>(lane_.row / 16 * (lane_.columns / 16) + lane_.column / 16);
    }
  }

 private:
  template <int lanes, bool shared>
  __device__ void put(int64_t index) {
    const float most = greatest<lanes>(most_);
    if (threadIdx.x % lanes != 0) return;
    if constexpr (shared) {
      out_.raise(w_[column::ROW_AMAX] + index, most);
    } else {
      out_.store(w_[column::ROW_AMAX] + index, most);
    }
  }

  const Lane& lane_;
  const Weight& w_;
  const Block& block_;
  const AmaxSink& out_;
  float most_ = 0.0f;
};

// Blocks of 1 x 32, four lanes a row, and of 32 x 1, which a lane goes down.
template <>
class PanelAmaxes<Grid::kRowsAndColumns> {
 public:
  __device__ PanelAmaxes(const Lane& lane, const Weight& w, const Format&, const AmaxSink& out)
      : lane_(lane), w_(w), out_(out), across_(lane.columns / 32) {}

  __device__ void row(int r, const Row& x) {
    const float most = greatest<4>(row_amax(x));
    if (threadIdx.x % 4 == 0) {
      out_.store(w_[column::ROW_AMAX] + (lane_.row + r) * across_ + lane_.column / 32, most);
    }
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) columns_[c] = fmaxf(columns_[c], fabsf(x[c]));
  }

  __device__ void finish() {
    const int64_t first = w_[column::COLUMN_AMAX] + lane_.row / 32 * lane_.columns + lane_.column;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) out_.store(first + c, columns_[c]);
  }

 private:
  const Lane& lane_;
  const Weight& w_;
  const AmaxSink& out_;
  const int64_t across_;
  float columns_[kLaneColumns] = {};
};

}  // namespace zerocast::cuda
