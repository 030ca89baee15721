// Shapes of scale buffers, as `rowwise_scale_inv` and `columnwise_scale_inv` of
// zerocast/formats/layout.py, with `scale_repeat` of spec.py. Padding is 1.0 in f32 buffers and 0 in byte
// buffers; bf16 buffers have none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "descriptor.h"

namespace zerocast {

struct ScaleBuffer {
  GridShape grid;          // the scales
  int64_t repeat;          // buffer rows that one scale fills
  int64_t repeat_columns;  // buffer columns that one scale fills
  int64_t rows, columns;
  int64_t entry;  // bytes of an entry: an f32, a bf16, or one E8M0 or E4M3 byte

  // Rows and columns that are not padding.
  ZC_HD int64_t used_rows() const { return grid.down * repeat; }
  ZC_HD int64_t used_columns() const { return grid.across * repeat_columns; }
  ZC_HD int64_t row_bytes() const { return columns * entry; }

  void pad(uint8_t* at, int64_t entries) const {
    if (entry == 1) {
      std::memset(at, 0, entries);
    } else {
      std::fill_n(reinterpret_cast<float*>(at), entries, 1.0f);
    }
  }
};

ZC_HD ScaleBuffer rowwise_scale_buffer(const Format& format, int64_t rows, int64_t columns) {
  const GridShape grid = grid_shape(format.block, rows, columns);
  if (!format.block) return {grid, 1, 1, 1, 1, sizeof(float)};
  if (format.scale_rule == ScaleRule::kBF16) return {grid, 1, 1, grid.down, grid.across, sizeof(uint16_t)};
  const int64_t width = round_up(grid.across, 4);
  if (format.scale_rule == ScaleRule::kFP32) return {grid, 1, 1, grid.down, width, sizeof(float)};
  return {grid, format.block.rows, 1, round_up(rows, 128), width, 1};
}

ZC_HD ScaleBuffer columnwise_scale_buffer(const Format& format, int64_t rows, int64_t columns) {
  if (format.columnwise == Columnwise::kTranspose) return rowwise_scale_buffer(format, columns, rows);
  const Block block = format.columnwise == Columnwise::kShared ? format.block : format.columnwise_block;
  const GridShape grid = grid_shape(block, rows, columns);
  return {grid, 1, block.columns, round_up(grid.down, 4), round_up(grid.across * block.columns, 128), 1};
}

}  // namespace zerocast
