// Shapes and padding of scale buffers: zerocast/layout.py's `rowwise_scale_inv` and `columnwise_scale_inv` for the CPU
// stages.
#pragma once

#include <cstdint>

#include "descriptor.h"

namespace zerocast {

struct ScaleBuffer {
  GridShape grid;     // the entries that mean something
  int64_t repeat;     // buffer rows that one grid row fills
  int64_t used_rows;  // buffer rows that the grid fills
  int64_t rows, columns;
  int64_t entry;  // bytes of an entry: an f32, or one E8M0 or E4M3 byte

  int64_t row_bytes() const { return columns * entry; }
  // Writes padding: 1.0, or the byte 0.
  void pad(uint8_t* at, int64_t entries) const;
};

ScaleBuffer rowwise_scale_buffer(const Format& format, int64_t rows, int64_t columns);
ScaleBuffer columnwise_scale_buffer(const Format& format, int64_t rows, int64_t columns);

}  // namespace zerocast
