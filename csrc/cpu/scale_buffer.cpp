#include "cpu/scale_buffer.h"

#include <algorithm>
#include <cstring>

namespace zerocast {

void ScaleBuffer::pad(uint8_t* at, int64_t entries) const {
  if (entry == 1) {
    std::memset(at, 0, entries);
  } else {
    std::fill_n(reinterpret_cast<float*>(at), entries, 1.0f);
  }
}

ScaleBuffer rowwise_scale_buffer(const Format& format, int64_t rows, int64_t columns) {
  const GridShape grid = grid_shape(format.block, rows, columns);
  if (!format.block) return {grid, 1, 1, 1, 1, sizeof(float)};
  const int64_t width = round_up(grid.across, 4);
  if (format.scale_rule == ScaleRule::kFP32) return {grid, 1, grid.down, grid.down, width, sizeof(float)};
  const int64_t repeat = format.scale_rule == ScaleRule::kTwoLevel ? format.block.rows : 1;
  return {grid, repeat, rows, round_up(rows, 128), width, 1};
}

ScaleBuffer columnwise_scale_buffer(const Format& format, int64_t rows, int64_t columns) {
  if (format.columnwise == Columnwise::kTranspose) return rowwise_scale_buffer(format, columns, rows);
  const GridShape grid = grid_shape(format.columnwise_block, rows, columns);
  return {grid, 1, grid.down, round_up(grid.down, 4), round_up(grid.across, 128), 1};
}

}  // namespace zerocast
