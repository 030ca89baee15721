// The largest amaxes of groups of blocks, on which the scales of a block depend besides its own.
#pragma once

#include <algorithm>
#include <array>

#include "descriptor.h"

namespace zerocast {

// A grid of amaxes in the packed buffer, and how they are read.
struct PackedGrid {
  Array packed;
  int64_t first;
  GridShape shape;
  void (*load)(Dtype dtype, const void* packed, float* amaxes, int64_t n);

  void row(int64_t row, int64_t column, int64_t n, float* amaxes) const {
    const int64_t index = first + row * shape.across + column;
    load(packed.dtype, reinterpret_cast<const void*>(packed.address + index * size_of(packed.dtype)), amaxes, n);
  }
};

constexpr int64_t kMostGroupColumns = 1024;

// Writes the largest amax of the group of each of n blocks of a grid row, at most
// kMostGroupColumns, which begin with a group.
inline void group_amaxes(const Format& format, const PackedGrid& grid, int64_t row, int64_t column, int64_t n,
                         float* groups) {
  const int64_t down = format.scale_group.rows / format.block.rows,
                across = format.scale_group.columns / format.block.columns;
  const int64_t top = row / down * down, bottom = std::min(top + down, grid.shape.down);
  std::array<float, kMostGroupColumns> line;
  std::fill_n(groups, n, 0.0f);
  for (int64_t r = top; r < bottom; ++r) {
    grid.row(r, column, n, line.data());
    for (int64_t i = 0; i < n; ++i) groups[i] = std::max(groups[i], line[i]);
  }
  for (int64_t i = 0; i < n; i += across) {
    float* last = groups + std::min(n, i + across);
    std::fill(groups + i, last, *std::max_element(groups + i, last));
  }
}

}  // namespace zerocast
