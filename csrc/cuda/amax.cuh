// Reduces a lane's elements to the packed amaxes of their blocks; for partial_amax and adam_amax.
//
// A maximum is rounded to the nominal dtype once a block, as rounding is monotone.
#pragma once

#include "cuda/panel.cuh"

namespace zerocast::cuda {

// The kinds of block grids that the kernels know: the whole tensor, squares, and 1 x 32 with 32 x 1.
enum class Grid { kTensor, kSquare128, kSquare32, kSquare16, kRowsAndColumns };

// The side of a square block; 0 for the other grids.
__host__ __device__ constexpr int side_of(Grid grid) {
  return grid == Grid::kSquare128 ? 128 : grid == Grid::kSquare32 ? 32 : grid == Grid::kSquare16 ? 16 : 0;
}

// A format with block sizes known to the compiler, so that divisions are by powers of two.
template <Grid kGrid>
__device__ Format known(Format format) {
  constexpr int64_t kSide = side_of(kGrid);
  constexpr bool kOwn = kGrid == Grid::kRowsAndColumns;
  format.block = kOwn ? Block{1, 32} : Block{kSide, kSide};
  format.columnwise_block = kOwn ? Block{32, 1} : Block{0, 0};
  if (kGrid != Grid::kSquare32) format.columnwise = kOwn ? Columnwise::kOwnGrid : Columnwise::kTranspose;
  return format;
}

__host__ __device__ constexpr int panel_rows(Grid grid) {
  return grid == Grid::kRowsAndColumns || grid == Grid::kSquare32 ? 2 * kPanelRows : kPanelRows;
}

// The destination of amaxes and the dtype that they are rounded to.
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

// Notes, where the table has a place for it, that an element of a lane is not finite. Several
// threads may write the same value.
__device__ inline void note_poison(const Weight& w, const AmaxSink& out, float poison) {
  if (poison != 0.0f && w[column::NOT_FINITE] >= 0) out.packed.store(w[column::NOT_FINITE], 1.0f);
}

using AmaxLane = Lane<kAmaxShape.lane_columns>;
using AmaxRow = Row<kAmaxShape.lane_columns>;

constexpr int kAmaxRows = 8;  // rows that a lane reduces at once
using AmaxLane = Lane<kAmaxShape.lane_columns>;
using AmaxElements = Row<kAmaxShape.lane_columns>[kAmaxRows];

// The amaxes of the blocks under a panel, eight rows at a time. All threads of a block pass all
// rows, with zeros for elements that are not owned.
template <Grid kGrid>
class PanelAmaxes {
 public:
  __device__ PanelAmaxes(const AmaxLane& lane, const Weight& w, const AmaxSink& out) : lane_(lane), w_(w), out_(out) {}

  __device__ void rows(int, const AmaxElements& x) {
#pragma unroll
    for (int r = 0; r < kAmaxRows; ++r) {
      most_ = fmaxf(most_, row_amax<kAmaxShape.lane_columns>(x[r]));
      add_poison<kAmaxShape.lane_columns>(x[r], poison_);
    }
  }

  __device__ void finish() const {
    note_poison(w_, out_, poison_);
    if constexpr (kGrid == Grid::kSquare16 || kGrid == Grid::kSquare32) {
      // Some lanes hold a block in whole, so nobody else writes it.
      constexpr int kSide = side_of(kGrid), kLanes = kSide / kAmaxShape.lane_columns;
      static_assert(panel_rows(kGrid) == kSide);
      const float most = greatest<kLanes>(most_);
      if (threadIdx.x % kLanes == 0) {
        out_.store(w_[column::ROW_AMAX] + lane_.row / kSide * (lane_.columns / kSide) + lane_.column / kSide, most);
      }
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
  float most_ = 0.0f, poison_ = 0.0f;
};

// Halves a list that two lanes share: the lane with the bit keeps the upper half, the other the
// lower, each with the maximum of both.
template <int n>
__device__ void fold(float (&of)[n], int bit) {
  const bool upper = threadIdx.x & bit;
#pragma unroll
  for (int i = 0; i < n / 2; ++i) {
    const float kept = upper ? of[n / 2 + i] : of[i], given = upper ? of[i] : of[n / 2 + i];
    of[i] = fmaxf(kept, __shfl_xor_sync(0xFFFFFFFFu, given, bit));
  }
}

// Blocks of 1 x 32, over eight lanes of a row, and of 32 x 1, along the rows of one lane.
template <>
class PanelAmaxes<Grid::kRowsAndColumns> {
 public:
  __device__ PanelAmaxes(const AmaxLane& lane, const Weight& w, const AmaxSink& out)
      : lane_(lane), w_(w), out_(out), across_(lane.columns / 32) {}

  // Eight lanes fold eight rows until each has one: 7 shuffles, where row by row would take 24.
  __device__ void rows(int first, const AmaxElements& x) {
    float eight[kAmaxRows];
#pragma unroll
    for (int r = 0; r < kAmaxRows; ++r) {
      eight[r] = row_amax<kAmaxShape.lane_columns>(x[r]);
      add_poison<kAmaxShape.lane_columns>(x[r], poison_);
#pragma unroll
      for (int c = 0; c < kAmaxShape.lane_columns; ++c) columns_[c] = fmaxf(columns_[c], fabsf(x[r][c]));
    }
    fold(eight, 4);
    float four[4] = {eight[0], eight[1], eight[2], eight[3]};
    fold(four, 2);
    float two[2] = {four[0], four[1]};
    fold(two, 1);
    out_.store(w_[column::ROW_AMAX] + (lane_.row + first + threadIdx.x % 8) * across_ + lane_.column / 32, two[0]);
  }

  __device__ void finish() const {
    note_poison(w_, out_, poison_);
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
  float poison_ = 0.0f;
};

}  // namespace zerocast::cuda
