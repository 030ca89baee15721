// A lane's part of a panel: some neighbouring columns of each row, and their master elements.
#pragma once

#include "cuda/geometry.h"
#include "cuda/memory.cuh"

namespace zerocast::cuda {

// The position of a lane: `row`, `column` and `element` of its first element.
template <int kColumns>
struct Lane {
  int64_t row, column, element;
  int64_t pitch, rows, columns;
  int64_t start, stop;  // bounds of the owned span

  // The owned columns [first, last) of row `r`; none if last <= first.
  struct Owned {
    int first, last;
    __device__ bool has(int c) const { return c >= first && c < last; }
  };
  __device__ Owned owned(int r) const {
    if (row + r >= rows) return {0, 0};
    const int64_t e = element + r * pitch;
    return {clamp(start - e), min(clamp(stop - e), clamp(columns - column))};
  }

  // The lane `r` rows below and `c` columns to the right.
  __device__ Lane at(int r, int c) const {
    Lane lane = *this;
    lane.row += r;
    lane.column += c;
    lane.element += r * pitch + c;
    return lane;
  }

  // True if all elements of `height` rows are owned, with `before` more before and `after` behind
  // them.
  __device__ bool whole(int height, int before = 0, int after = 0) const {
    return row + height <= rows && column + kColumns <= columns && element - before >= start &&
           element + (height - 1) * pitch + kColumns + after <= stop;
  }

  __device__ bool empty() const { return column >= columns || row >= rows || element >= stop; }

 private:
  __device__ static int clamp(int64_t x) { return x <= 0 ? 0 : x >= kColumns ? kColumns : static_cast<int>(x); }
};

template <int kColumns>
__device__ Lane<kColumns> lane_at(const PanelGrid& grid, const Weight& w, int64_t row, int64_t column) {
  Lane<kColumns> lane;
  lane.row = row;
  lane.column = column;
  lane.pitch = grid.pitch;
  lane.rows = grid.rows;
  lane.columns = grid.columns;
  lane.element = grid.origin + row * grid.pitch + column;
  lane.start = w.start();
  lane.stop = w.stop();
  return lane;
}

template <int kColumns>
__device__ Lane<kColumns> find_lane(const PanelGrid& grid, const Weight& w, uint32_t ordinal, int panel_rows, int warps) {
  const uint32_t group = ordinal / grid.across, across = ordinal - group * grid.across;
  const int64_t band = static_cast<int64_t>(group) * warps + threadIdx.x / kWarpLanes;
  const int64_t column = static_cast<int64_t>(across) * (kWarpLanes * kColumns) + threadIdx.x % kWarpLanes * kColumns;
  return lane_at<kColumns>(grid, w, band * panel_rows, column);
}

// Elements of one row of a lane, widened; 0 where none is owned.
template <int kColumns>
using Row = float[kColumns];

// fmaxf ignores NaN.
template <int kColumns>
__device__ float row_amax(const Row<kColumns>& x) {
  float most = 0.0f;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) most = fmaxf(most, fabsf(x[c]));
  return most;
}

// `poison` is no longer 0 once an element was NaN or Inf: those times 0 are NaN.
template <int kColumns>
__device__ void add_poison(const Row<kColumns>& x, float& poison) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) poison = fmaf(x[c], 0.0f, poison);
}

// Four words of a storage type, read or written at once, without cache hints: streaming hints made
// casts 3 to 8 % slower on an H200.
template <class Storage>
struct Four {
  using Word = typename Storage::Word;
  using Bits = std::conditional_t<sizeof(Word) == 4, uint4, uint2>;
  static constexpr int kBytes = sizeof(Bits);
  Word words[4];

  __device__ static Four load(const Word* at) {
    const Bits bits = *reinterpret_cast<const Bits*>(at);
    Four four;
    memcpy(&four, &bits, kBytes);
    return four;
  }
  __device__ Bits bits() const {
    Bits bits;
    memcpy(&bits, this, kBytes);
    return bits;
  }
  __device__ void store(Word* at) const { *reinterpret_cast<Bits*>(at) = bits(); }
  __device__ float operator[](int i) const { return Storage::widen(words[i]); }
};

// Reads the master elements of a lane's rows. `origin` is the address of element 0, which may not
// exist.
template <class Storage, int kColumns>
class MasterReader {
 public:
  using Word = typename Storage::Word;

  __device__ MasterReader(const Lane<kColumns>& lane, uint64_t origin, int height)
      : lane_(lane), first_(reinterpret_cast<const Word*>(origin + lane.element * static_cast<int64_t>(sizeof(Word)))) {
    const int shift = static_cast<int>(reinterpret_cast<uint64_t>(first_) / sizeof(Word) % 4);
    const bool alike = lane.pitch % 4 == 0;  // all rows have the same alignment
    if (alike && shift == 0 && lane.whole(height)) {
      shift_ = 0;
    } else if (alike && lane.whole(height, shift, 4 - shift)) {
      shift_ = shift;
    } else {
      shift_ = kByElement;
    }
  }

  // Rows [first, first + kRows) of the lane; all loads are in flight before one is needed.
  template <int kRows>
  __device__ void read(int first, Row<kColumns> (&x)[kRows]) const {
    const Word* at = first_ + first * lane_.pitch;
    if (shift_ == 0) {
      read_aligned(at, x);
    } else if (shift_ != kByElement) {
      read_shifted(at - shift_, x);
    } else {
      read_owned(at, first, x);
    }
  }

 private:
  static constexpr int kByElement = 4;

  template <int kRows>
  __device__ void read_aligned(const Word* at, Row<kColumns> (&x)[kRows]) const {
    Four<Storage> v[kRows][kColumns / 4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) v[r][i] = Four<Storage>::load(at + r * lane_.pitch + 4 * i);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) x[r][c] = v[r][c / 4][c % 4];
    }
  }

  // One more aligned vector covers the words from any of four offsets; it is the next lane's first.
  template <int kRows>
  __device__ void read_shifted(const Word* at, Row<kColumns> (&x)[kRows]) const {
    Four<Storage> v[kRows][kColumns / 4 + 1];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i <= kColumns / 4; ++i) v[r][i] = Four<Storage>::load(at + r * lane_.pitch + 4 * i);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float value = 0.0f;
#pragma unroll
        for (int s = 1; s < 4; ++s) {
          if (s == shift_) value = v[r][(c + s) / 4][(c + s) % 4];
        }
        x[r][c] = value;
      }
    }
  }

  // Inlined, as everything here: ptxas 13.0 keeps values that all lanes share in uniform registers
  // across a call that only some lanes make, and the callee overwrites them.
  template <int kRows>
  __device__ void read_owned(const Word* at, int first, Row<kColumns> (&x)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const typename Lane<kColumns>::Owned owned = lane_.owned(first + r);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) x[r][c] = owned.has(c) ? Storage::widen(at[r * lane_.pitch + c]) : 0.0f;
    }
  }

  const Lane<kColumns>& lane_;
  const Word* first_;
  int shift_;  // words from an aligned address to the lane's first, or kByElement
};

// The address of element 0 of a weight in a list of bases that is parallel to its masters.
template <class Storage>
__device__ uint64_t origin_of(const BaseList& bases, const Weight& w) {
  return bases.addresses[w[column::MASTER_BASE]] +
         (w[column::MASTER_OFFSET] - w.start()) * static_cast<int64_t>(sizeof(typename Storage::Word));
}

// The largest of a warp's numbers, none of which is negative: such are in the order of their bits, and
// NaN is greater.
__device__ inline float largest_of_warp(float most) {
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(most)));
}

// The maximum over `lanes` neighbouring lanes, in all of them.
template <int lanes>
__device__ float greatest(float value) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

}  // namespace zerocast::cuda
