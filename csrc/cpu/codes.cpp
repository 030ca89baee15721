#include "cpu/codes.h"

#include <algorithm>
#include <cstring>

namespace zerocast {
namespace {

// Portable vectors of the compiler: 16 bytes are one register on x86-64 and on arm64.
using Bytes16 = uint8_t __attribute__((vector_size(16)));

#if defined(__clang__)
#define ZC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Bytes16{__VA_ARGS__})
#endif

Bytes16 low_halves(Bytes16 a, Bytes16 b) { return ZC_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }

Bytes16 high_halves(Bytes16 a, Bytes16 b) {
  return ZC_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Interleaves rows i and i + 8 four times, which swaps the index bits of row and column.
void transpose_16x16(const uint8_t* from, uint8_t* to) {
  Bytes16 a[16], b[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&a[i], from + i * kSquare, 16);
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = low_halves(a[i], a[i + 8]);
      b[2 * i + 1] = high_halves(a[i], a[i + 8]);
    }
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = low_halves(b[i], b[i + 8]);
      a[2 * i + 1] = high_halves(b[i], b[i + 8]);
    }
  }
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * kSquare, &a[i], 16);
}

#undef ZC_SHUFFLE

}  // namespace

void transpose(const Square& from, Square& to) {
  for (int64_t r = 0; r < kSquare; r += 16) {
    for (int64_t c = 0; c < kSquare; c += 16) transpose_16x16(&from.bytes[r][c], &to.bytes[c][r]);
  }
}

void ByteMatrix::load(int64_t row, int64_t column, Square& square) const {
  const int64_t height = std::min(kSquare, rows - row), width = std::min(kSquare, columns - column);
  if (width == kSquare) {  // a size that the compiler knows
    for (int64_t r = 0; r < height; ++r) std::memcpy(square.bytes[r], at(row + r, column), kSquare);
  } else {
    for (int64_t r = 0; r < height; ++r) std::memcpy(square.bytes[r], at(row + r, column), width);
  }
}

void ByteMatrix::store(int64_t row, int64_t column, const Square& square) const {
  const int64_t height = std::min(kSquare, rows - row), width = std::min(kSquare, columns - column);
  if (width == kSquare) {
    for (int64_t r = 0; r < height; ++r) std::memcpy(at(row + r, column), square.bytes[r], kSquare);
  } else {
    for (int64_t r = 0; r < height; ++r) std::memcpy(at(row + r, column), square.bytes[r], width);
  }
}

void unpack_even(const uint8_t* __restrict bytes, uint8_t* __restrict codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) codes[i] = bytes[i] & 0x0F;
}

void unpack_odd(const uint8_t* __restrict bytes, uint8_t* __restrict codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) codes[i] = bytes[i] >> 4;
}

void unpack(const uint8_t* __restrict bytes, uint8_t* __restrict codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    codes[2 * i] = bytes[i] & 0x0F;
    codes[2 * i + 1] = bytes[i] >> 4;
  }
}

void repack_even(const uint8_t* __restrict bytes, uint8_t* __restrict packed, int64_t n) {
  for (int64_t i = 0; i < n; ++i) packed[i] = static_cast<uint8_t>((bytes[2 * i] & 0x0F) | (bytes[2 * i + 1] << 4));
}

void repack_odd(const uint8_t* __restrict bytes, uint8_t* __restrict packed, int64_t n) {
  for (int64_t i = 0; i < n; ++i) packed[i] = static_cast<uint8_t>((bytes[2 * i] >> 4) | (bytes[2 * i + 1] & 0xF0));
}

}  // namespace zerocast
