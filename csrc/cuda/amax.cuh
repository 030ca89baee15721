// Reduces a lane's elements to the packed amaxes of their blocks; for partial_amax and the stages of
// Adam.
//
// A maximum is rounded to the nominal dtype once a block, as rounding is monotone.
#pragma once

#include "cuda/panel.cuh"

namespace zerocast::cuda {

// The kinds of block grids that the kernels know: the whole tensor, squares, 1 x 32, and 1 x 32 with
// 32 x 1.
enum class Grid { kTensor, kSquare128, kSquare32, kSquare16, kRows, kRowsAndColumns };

__host__ __device__ constexpr bool has_rows(Grid grid) { return grid == Grid::kRows || grid == Grid::kRowsAndColumns; }

// The side of a square block; 0 for the other grids.
__host__ __device__ constexpr int side_of(Grid grid) {
  return grid == Grid::kSquare128 ? 128 : grid == Grid::kSquare32 ? 32 : grid == Grid::kSquare16 ? 16 : 0;
}

// A format with block sizes known to the compiler, so that divisions are by powers of two.
template <Grid kGrid>
__device__ Format known(Format format) {
  constexpr int64_t kSide = side_of(kGrid);
  constexpr bool kOwn = kGrid == Grid::kRowsAndColumns;
  format.block = has_rows(kGrid) ? Block{1, 32} : Block{kSide, kSide};
  format.columnwise_block = kOwn ? Block{32, 1} : Block{0, 0};
  if (kGrid == Grid::kRows) {
    format.columnwise = Columnwise::kNone;
  } else if (kGrid != Grid::kSquare32) {
    format.columnwise = kOwn ? Columnwise::kOwnGrid : Columnwise::kTranspose;
  }
  return format;
}

__host__ __device__ constexpr int panel_rows(Grid grid) {
  return has_rows(grid) || grid == Grid::kSquare32 ? 2 * kPanelRows : kPanelRows;
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
using AmaxElements = AmaxRow[kAmaxRows];

// A lane of a panel of a weight, and where amaxes go.
struct AmaxPlace {
  const AmaxLane& lane;
  const Weight& w;
  const AmaxSink& out;
};

// The amaxes of the blocks under a panel, from rows one by one or eight at a time. All threads of a
// warp pass the same rows, with zeros for elements that are not owned; those of a block finish.
template <Grid kGrid>
class PanelAmaxes {
 public:
  // Rows may be entered together, by their largest absolute value, if that is finite.
  static constexpr bool kTakesMost = true;
  __device__ void finite_row(int, const AmaxRow&) {}
  __device__ void finite_rows(float most) { most_ = fmaxf(most_, most); }

  __device__ void row(const AmaxPlace&, int, const AmaxRow& x) {
    most_ = fmaxf(most_, row_amax<kAmaxShape.lane_columns>(x));
    add_poison<kAmaxShape.lane_columns>(x, poison_);
  }
  __device__ void rows(const AmaxPlace& at, int first, const AmaxElements& x) {
#pragma unroll
    for (int r = 0; r < kAmaxRows; ++r) row(at, first + r, x[r]);
  }

  __device__ void finish(const AmaxPlace& at) const {
    const auto& [lane, w, out] = at;
    note_poison(w, out, poison_);
    if constexpr (kGrid == Grid::kSquare16 || kGrid == Grid::kSquare32) {
      // Some lanes hold a block in whole, so nobody else writes it.
      constexpr int kSide = side_of(kGrid), kLanes = kSide / kAmaxShape.lane_columns;
      static_assert(panel_rows(kGrid) == kSide);
      const float most = greatest<kLanes>(most_);
      if (threadIdx.x % kLanes == 0) {
        out.store(w[column::ROW_AMAX] + lane.row / kSide * (lane.columns / kSide) + lane.column / kSide, most);
      }
      return;
    }
    const float most = greatest_of_block();
    if (threadIdx.x != 0) return;
    if constexpr (kGrid == Grid::kSquare128) {  // a thread block holds a block in whole
      const int64_t across = (lane.columns + 127) / 128;
      out.store(w[column::ROW_AMAX] + lane.row / 128 * across + lane.column / 128, most);
    } else {  // one amax of the whole tensor
      out.raise(w[column::ROW_AMAX], most);
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

// Blocks of 1 x 32, over eight lanes of a row, and with kColumns of 32 x 1, along the rows of one
// lane.
template <bool kColumns>
class RowAmaxes {
 public:
  static constexpr bool kTakesMost = false;

  __device__ void row(const AmaxPlace& at, int r, const AmaxRow& x) {
    const float most = greatest<kAmaxRows>(lane_amax(x));
    if (threadIdx.x % kAmaxRows == 0) store(at, r, most);
  }

  // Eight lanes fold eight rows until each has one: 7 shuffles, where row by row takes 24.
  __device__ void rows(const AmaxPlace& at, int first, const AmaxElements& x) {
    float eight[kAmaxRows];
#pragma unroll
    for (int r = 0; r < kAmaxRows; ++r) eight[r] = lane_amax(x[r]);
    fold(eight, 4);
    float four[4] = {eight[0], eight[1], eight[2], eight[3]};
    fold(four, 2);
    float two[2] = {four[0], four[1]};
    fold(two, 1);
    store(at, first + threadIdx.x % kAmaxRows, two[0]);
  }

  __device__ void finish(const AmaxPlace& at) const {
    const auto& [lane, w, out] = at;
    note_poison(w, out, poison_);
    if constexpr (!kColumns) return;
    const int64_t first = w[column::COLUMN_AMAX] + lane.row / 32 * lane.columns + lane.column;
#pragma unroll
    for (int c = 0; c < kAmaxShape.lane_columns; ++c) out.store(first + c, columns_[c]);
  }

 private:
  // The amax of a block of a row.
  __device__ static void store(const AmaxPlace& at, int r, float amax) {
    const auto& [lane, w, out] = at;
    out.store(w[column::ROW_AMAX] + (lane.row + r) * (lane.columns / 32) + lane.column / 32, amax);
  }

  // Folds a row into the columns; returns its largest absolute value.
  __device__ float lane_amax(const AmaxRow& x) {
    add_poison<kAmaxShape.lane_columns>(x, poison_);
    if constexpr (kColumns) {
#pragma unroll
      for (int c = 0; c < kAmaxShape.lane_columns; ++c) columns_[c] = fmaxf(columns_[c], fabsf(x[c]));
    }
    return row_amax<kAmaxShape.lane_columns>(x);
  }

  float columns_[kAmaxShape.lane_columns] = {};
  float poison_ = 0.0f;
};

template <>
class PanelAmaxes<Grid::kRows> : public RowAmaxes<false> {};
template <>
class PanelAmaxes<Grid::kRowsAndColumns> : public RowAmaxes<true> {};

}  // namespace zerocast::cuda
