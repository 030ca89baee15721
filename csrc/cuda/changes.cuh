// Which bytes of a weight's rowwise data become others: bits in a bitmap that a cast sets and never
// clears.
#pragma once

#include "cuda/memory.cuh"

namespace zerocast::cuda {

// Bit i is set where byte i of two words differs, in memory order.
__device__ inline uint32_t differing_bytes(uint32_t a, uint32_t b) { return __vsetne4(a, b) * 0x01020408u >> 24; }
__device__ inline uint32_t differing_bytes(uint2 a, uint2 b) {
  return differing_bytes(a.x, b.x) | differing_bytes(a.y, b.y) << 4;
}
__device__ inline uint32_t differing_bytes(uint4 a, uint4 b) {
  return differing_bytes(uint2{a.x, a.y}, uint2{b.x, b.y}) | differing_bytes(uint2{a.z, a.w}, uint2{b.z, b.w}) << 8;
}
__device__ inline uint32_t differing_bytes(uint16_t a, uint16_t b) {
  return differing_bytes(static_cast<uint32_t>(a), static_cast<uint32_t>(b));
}

// The bits of one weight. Lanes, and thread blocks, share words of it; nothing is sent where nothing
// changed, and of what is sent nothing comes back.
class ChangeMap {
 public:
  __device__ ChangeMap(uint32_t* words, const Weight& w) : words_(words), first_(w[column::CHANGED]) {}

  // Sets the bits of up to 32 bytes, of which `byte` is the first.
  __device__ void set(int64_t byte, uint32_t bits) const {
    const int64_t bit = first_ + byte;
    const uint64_t placed = static_cast<uint64_t>(bits) << (bit % 32);
    const auto low = static_cast<uint32_t>(placed), high = static_cast<uint32_t>(placed >> 32);
    if (low) atomicOr(words_ + bit / 32, low);
    if (high) atomicOr(words_ + bit / 32 + 1, high);
  }

  // Writes a byte of the weight, and its bit if it was another one.
  __device__ void write(uint64_t origin, int64_t byte, uint8_t value) const {
    auto* held = reinterpret_cast<uint8_t*>(origin + byte);
    if (*held == value) return;
    *held = value;
    set(byte, 1);
  }

 private:
  uint32_t* words_;
  int64_t first_;
};

}  // namespace zerocast::cuda
