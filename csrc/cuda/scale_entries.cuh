// Neighbouring entries of a row of a scale buffer.
#pragma once

#include "cuda/geometry.h"

namespace zerocast::cuda {

// Stores the entries from `column` on that the buffer has; bytes come in fours.
__device__ inline void write_entries(const ScaleBuffer& buffer, uint8_t* row, uint32_t column,
                                     const uint32_t (&entries)[kScaleEntries]) {
  if (buffer.entry == 1) {
    auto* at = row + column;
    const uint32_t word = entries[0] | entries[1] << 8 | entries[2] << 16 | entries[3] << 24;
    if (reinterpret_cast<uint64_t>(at) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(at) = word;
    } else {
#pragma unroll
      for (int i = 0; i < kScaleEntries; ++i) at[i] = static_cast<uint8_t>(entries[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kScaleEntries; ++i) {
      if (column + i < buffer.columns) reinterpret_cast<uint32_t*>(row)[column + i] = entries[i];
    }
  }
}

}  // namespace zerocast::cuda
