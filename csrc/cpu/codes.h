// Turning of matrices of codes in squares of bytes that fit in the first-level cache.
#pragma once

#include <cstdint>

namespace zerocast {

constexpr int64_t kSquare = 64;

struct alignas(64) Square {
  uint8_t bytes[kSquare][kSquare];
};

void transpose(const Square& from, Square& to);

// A stored matrix, in bytes.
struct ByteMatrix {
  uint8_t* data;
  int64_t rows, columns;

  uint8_t* at(int64_t row, int64_t column) const { return data + row * columns + column; }

  // The square at (row, column). What lies outside the matrix is left as it is in `square`, and is not written by `store`.
  void load(int64_t row, int64_t column, Square& square) const;
  void store(int64_t row, int64_t column, const Square& square) const;
};

// Two codes a byte: the even one, in the low half, and the odd one of n bytes, one code a byte.
void unpack_even(const uint8_t* bytes, uint8_t* codes, int64_t n);
void unpack_odd(const uint8_t* bytes, uint8_t* codes, int64_t n);
// Codes of 2n bytes in their order.
void unpack(const uint8_t* bytes, uint8_t* codes, int64_t n);

// The even, and the odd, codes of 2n bytes, packed into n.
void repack_even(const uint8_t* bytes, uint8_t* packed, int64_t n);
void repack_odd(const uint8_t* bytes, uint8_t* packed, int64_t n);

}  // namespace zerocast
