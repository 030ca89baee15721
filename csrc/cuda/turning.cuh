// Rows of bytes to columns, in registers and in shared memory.
#pragma once

#include <cstdint>

namespace zerocast::cuda {

// The place of word `word` of a column of `words`. The exclusive or puts the pieces of four words
// that neighbouring lanes write into different banks, and keeps a piece contiguous.
template <int words, int kColumnsPerLane>
__device__ inline int place(int column, int word) {
  return column * words + (word ^ (column / kColumnsPerLane % 8 * 4));
}

// Transposes four rows of four bytes to four columns.
__device__ inline void transpose_bytes(uint32_t (&w)[4]) {
  const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, b, 0x5410);
  w[1] = __byte_perm(a, b, 0x7632);
  w[2] = __byte_perm(c, d, 0x5410);
  w[3] = __byte_perm(c, d, 0x7632);
}

}  // namespace zerocast::cuda
