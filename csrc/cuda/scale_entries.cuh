// Neighbouring entries of a row of a scale buffer: 16 bytes, as four words.
#pragma once

#include "cuda/geometry.h"

namespace zerocast::cuda {

constexpr int kScaleWords = kScaleBytes / 4;
using ScaleWords = uint32_t[kScaleWords];

// Stores the bytes from byte `column` of a row on that the row has.
__device__ inline void write_words(uint8_t* row, uint32_t column, uint32_t row_bytes, const ScaleWords& words) {
  uint8_t* at = row + column;
  const uint64_t address = reinterpret_cast<uint64_t>(at);
  if (address % 16 == 0 && column + kScaleBytes <= row_bytes) {
    *reinterpret_cast<uint4*>(at) = {words[0], words[1], words[2], words[3]};
  } else if (address % 8 == 0 && column + kScaleBytes <= row_bytes) {
    reinterpret_cast<uint2*>(at)[0] = {words[0], words[1]};
    reinterpret_cast<uint2*>(at)[1] = {words[2], words[3]};
  } else {
#pragma unroll
    for (int i = 0; i < kScaleWords; ++i) {
      if (column + 4 * i >= row_bytes) return;
      if (address % 4 == 0 && column + 4 * i + 4 <= row_bytes) {
        reinterpret_cast<uint32_t*>(at)[i] = words[i];
      } else {
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
          if (column + 4 * i + byte < row_bytes) at[4 * i + byte] = static_cast<uint8_t>(words[i] >> (8 * byte));
        }
      }
    }
  }
}

// Two entries of two bytes.
__device__ inline uint32_t word_of(uint32_t first, uint32_t second) { return first | second << 16; }

// Four entries of one byte.
__device__ inline uint32_t word_of(const uint32_t (&entries)[4]) {
  return entries[0] | entries[1] << 8 | entries[2] << 16 | entries[3] << 24;
}

}  // namespace zerocast::cuda
