// The arguments of kernels and the access to memory through them.
#pragma once

#include <cstdint>

#include "codec.h"
#include "descriptor.h"

namespace zerocast::cuda {

// A thread block's weight, a row of the table, and the block's ordinal among those of that weight.
struct Item {
  int32_t weight;
  uint32_t ordinal;
};

__device__ inline Weight weight_of(const int64_t* table, const Item& item) {
  return {table + static_cast<int64_t>(item.weight) * column::WIDTH};
}

// Base addresses of one role, indexed by the *_BASE columns.
struct BaseList {
  const uint64_t* addresses;

  template <class T>
  __device__ T* at(const Weight& w, column::Column base, column::Column offset) const {
    return reinterpret_cast<T*>(addresses[w[base]]) + w[offset];
  }
};

struct Amaxes {
  void* address;
  bool bfloat16;

  __device__ float load(int64_t index) const {
    if (bfloat16) return Bfloat16::widen(static_cast<const uint16_t*>(address)[index]);
    return static_cast<const float*>(address)[index];
  }

  __device__ void store(int64_t index, float amax) const {
    if (bfloat16) {
      static_cast<uint16_t*>(address)[index] = static_cast<uint16_t>(bits_of(amax) >> 16);
    } else {
      static_cast<float*>(address)[index] = amax;
    }
  }

  // Amaxes are not negative, so their bits order alike. Most threads find a larger one and return.
  __device__ void raise(int64_t index, float amax) const {
    if (bfloat16) {
      auto* word = static_cast<uint16_t*>(address) + index;
      const auto mine = static_cast<uint16_t>(bits_of(amax) >> 16);
      uint16_t seen = *static_cast<volatile uint16_t*>(word);
      while (mine > seen) {
        const uint16_t found = atomicCAS(word, seen, mine);
        if (found == seen) break;
        seen = found;
      }
    } else {
      auto* word = static_cast<int32_t*>(address) + index;
      if (bits_of(amax) > *static_cast<volatile int32_t*>(word)) atomicMax(word, bits_of(amax));
    }
  }
};

// Flag bool[1], or null.
__device__ inline bool holds(const bool* flag) { return flag != nullptr && *flag; }

}  // namespace zerocast::cuda
