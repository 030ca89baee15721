// Writes bytes and notes which of them become others, in the bitmap that a stage was given.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "descriptor.h"

namespace zerocast {

// Bit i is set where byte i of a word, from its low end, is not 0.
inline uint8_t nonzero_bytes(uint64_t word) {
  word |= word >> 4;
  word |= word >> 2;
  word |= word >> 1;
  return static_cast<uint8_t>(((word & 0x0101010101010101u) * 0x0102040810204080u) >> 56);
}

// The bits of one weight's rowwise data. Rows of two threads may share a byte of the bitmap.
struct ChangeMap {
  uintptr_t bitmap;  // 0 for none
  int64_t first;     // the bit of byte 0 of the weight

  ChangeMap(uintptr_t bitmap, const Weight& weight) : bitmap(bitmap), first(weight[column::CHANGED]) {}
  explicit operator bool() const { return bitmap != 0; }

  // Writes n bytes of the weight, `origin` being the address of its byte 0, from `byte` on.
  void write(uintptr_t origin, int64_t byte, const uint8_t* values, int64_t n) const {
    auto* held = reinterpret_cast<uint8_t*>(origin + byte);
    for (int64_t i = 0; i < n; i += 8) {
      const int64_t size = std::min<int64_t>(8, n - i);
      uint64_t before = 0, after = 0;
      std::memcpy(&before, held + i, size);
      std::memcpy(&after, values + i, size);
      if (before == after) continue;
      std::memcpy(held + i, values + i, size);
      set(first + byte + i, nonzero_bytes(before ^ after));
    }
  }

 private:
  void set(int64_t bit, uint8_t bits) const {
    const unsigned placed = static_cast<unsigned>(bits) << (bit % 8);
    or_byte(bit / 8, static_cast<uint8_t>(placed));
    or_byte(bit / 8 + 1, static_cast<uint8_t>(placed >> 8));
  }
  void or_byte(int64_t index, uint8_t bits) const {
    if (bits) __atomic_fetch_or(reinterpret_cast<uint8_t*>(bitmap + index), bits, __ATOMIC_RELAXED);
  }
};

}  // namespace zerocast
