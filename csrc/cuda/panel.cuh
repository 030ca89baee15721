// A lane's part of a panel: 16 rows by 8 columns of master elements in registers.
#pragma once

#include "cuda/geometry.h"
#include "cuda/memory.cuh"

namespace zerocast::cuda {

// Where a lane of a warp stands. Rows are counted from the matrix's first, `column` and `element` are those of its first
// element.
struct Lane {
  int64_t row, column, element;
  int64_t pitch, rows, columns;
  int64_t start, stop;  // of the owned span

  __device__ bool owns(int r, int c) const {
    const int64_t e = element + r * pitch + c;
    return row + r < rows && column + c < columns && e >= start && e < stop;
  }

  // All 16 x 8 elements are owned, and so are `before` elements before the first and `after` behind the last.
  __device__ bool whole(int before, int after) const {
    return row + kPanelRows <= rows && column + kLaneColumns <= columns && element - before >= start &&
           element + (kPanelRows - 1) * pitch + kLaneColumns + after <= stop;
  }

  __device__ bool empty() const { return column >= columns || row >= rows || element >= stop; }
};

// The panel of this warp, or false beyond the last one. Half `half` of a panel of 32 rows.
__device__ inline bool find_lane(const PanelGrid& grid, const Weight& w, uint32_t ordinal, int64_t height, Lane& lane) {
  const uint32_t panel = ordinal * kPanelWarps + threadIdx.x / kWarpLanes;
  if (panel >= grid.count) return false;
  const uint32_t band = panel / grid.across, across = panel - band * grid.across;
  lane.row = grid.first_row + band * height;
  lane.column = static_cast<int64_t>(across) * kPanelColumns + threadIdx.x % kWarpLanes * kLaneColumns;
  lane.pitch = grid.pitch;
  lane.rows = grid.rows;
  lane.columns = grid.columns;
  lane.element = grid.origin + lane.row * grid.pitch + lane.column;
  lane.start = w.start();
  lane.stop = w.stop();
  return true;
}

__device__ inline Lane down(Lane lane, int rows) {
  lane.row += rows;
  lane.element += rows * lane.pitch;
  return lane;
}

// Words of a storage type by 16 bytes at a time.
template <class Storage>
struct Vector {
  static constexpr int kWords = 16 / sizeof(typename Storage::Word);
  uint4 bits;

  __device__ void load(const typename Storage::Word* at) { bits = __ldcs(reinterpret_cast<const uint4*>(at)); }
  __device__ typename Storage::Word operator[](int i) const {
    const uint32_t word = (&bits.x)[i * sizeof(typename Storage::Word) / 4];
    if constexpr (sizeof(typename Storage::Word) == 4) return word;
    return static_cast<typename Storage::Word>(i % 2 ? word >> 16 : word);
  }
};

// Elements of a lane, widened; 0 where none is owned.
using Row = float[kLaneColumns];
using Elements = Row[kPanelRows];

// fmaxf passes over NaN.
__device__ inline float row_amax(const Row& x) {
  float most = 0.0f;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) most = fmaxf(most, fabsf(x[c]));
  return most;
}

// Reads master elements; `origin` is the address of element 0, which usually lies in no storage.
template <class Storage>
struct MasterReader {
  using Word = typename Storage::Word;
  uint64_t origin;

  __device__ void operator()(const Lane& lane, Elements& x) const {
    constexpr int kWords = Vector<Storage>::kWords;
    const uint64_t first = origin + lane.element * sizeof(Word);
    const int shift = static_cast<int>(first / sizeof(Word) % kWords);
    const bool even = lane.pitch % kWords == 0;  // all rows lie alike to 16 bytes
    if (even && shift == 0 && lane.whole(0, 0)) {
      load_aligned(reinterpret_cast<const Word*>(first), lane.pitch, x);
    } else if (even && sizeof(Word) == 4 && lane.whole(shift, kWords - shift)) {
      load_shifted(reinterpret_cast<const Word*>(first) - shift, lane.pitch, shift, x);
    } else {
      load_owned(lane, reinterpret_cast<const Word*>(first), x);
    }
  }

 private:
  __device__ static void load_aligned(const Word* at, int64_t pitch, Elements& x) {
    constexpr int kWords = Vector<Storage>::kWords, kVectors = kLaneColumns / kWords;
    Vector<Storage> v[kPanelRows][kVectors];
#pragma unroll
    for (int r = 0; r < kPanelRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) v[r][i].load(at + r * pitch + i * kWords);
    }
#pragma unroll
    for (int r = 0; r < kPanelRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) x[r][c] = Storage::widen(v[r][c / kWords][c % kWords]);
    }
  }

  // Three aligned vectors hold the eight words from any of four places on; the third is next door's first.
  __device__ static void load_shifted(const Word* at, int64_t pitch, int shift, Elements& x) {
    constexpr int kWords = Vector<Storage>::kWords;
#pragma unroll
    for (int r = 0; r < kPanelRows; ++r) {
      Vector<Storage> v[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) v[i].load(at + r * pitch + i * kWords);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        float value = 0.0f;
#pragma unroll
        for (int s = 1; s < kWords; ++s) {
          if (s == shift) value = Storage::widen(v[(c + s) / kWords][(c + s) % kWords]);
        }
        x[r][c] = value;
      }
    }
  }

  __device__ static void load_owned(const Lane& lane, const Word* at, Elements& x) {
#pragma unroll
    for (int r = 0; r < kPanelRows; ++r) {
      const Vector<Float32> left = owned_four(lane, at, r, 0), right = owned_four(lane, at, r, 4);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[r][c] = Float32::widen(left[c]);
        x[r][c + 4] = Float32::widen(right[c]);
      }
    }
  }

  // Out of line: the edges of a span are few, and kernels compile four times faster.
  __device__ __noinline__ static Vector<Float32> owned_four(const Lane& lane, const Word* at, int r, int c) {
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = lane.owns(r, c + i) ? Storage::widen(at[r * lane.pitch + c + i]) : 0.0f;
    Vector<Float32> words;
    memcpy(&words, four, sizeof four);
    return words;
  }
};

// The address of element 0 of a weight in a list of bases that are cut as its masters are.
template <class Storage>
__device__ uint64_t origin_of(const BaseList& bases, const Weight& w) {
  return bases.addresses[w[column::MASTER_BASE]] +
         (w[column::MASTER_OFFSET] - w.start()) * static_cast<int64_t>(sizeof(typename Storage::Word));
}

// The greatest of `lanes` neighbouring lanes, in all of them.
template <int lanes>
__device__ float greatest(float value) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

}  // namespace zerocast::cuda
