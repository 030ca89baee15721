// Transposes matrices of codes in squares of bytes that fit in the first-level cache.
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

  // The square at (row, column). `load` leaves elements outside the matrix unchanged, `store` skips
  // them.
  void load(int64_t row, int64_t column, Square& square) const;
  void store(int64_t row, int64_t column, const Square& square) const;
};

// Unpack n bytes of two codes to one code a byte: the even codes (low halves), or the odd ones.
void unpack_even(const uint8_t* bytes, uint8_t* codes, int64_t n);
void unpack_odd(const uint8_t* bytes, uint8_t* codes, int64_t n);
// Unpacks n bytes to 2n codes in their order.
void unpack(const uint8_t* bytes, uint8_t* codes, int64_t n);

// Packs the even, or the odd, codes of 2n bytes into n bytes.
void repack_even(const uint8_t* bytes, uint8_t* packed, int64_t n);
void repack_odd(const uint8_t* bytes, uint8_t* packed, int64_t n);

}  // namespace zerocast
