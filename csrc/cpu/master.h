// The location of a weight's master elements.
#pragma once

#include <vector>

#include "descriptor.h"

namespace zerocast {

struct Master {
  uintptr_t origin;  // address of element 0, which may not exist: an integer until an element is owned
  int64_t size;
  Dtype dtype;

  Master(const std::vector<Array>& masters, const Weight& weight) {
    const Array& base = masters[weight[column::MASTER_BASE]];
    dtype = base.dtype;
    size = size_of(base.dtype);
    origin = base.address + (weight[column::MASTER_OFFSET] - weight.start()) * size;
  }
  // Prefetches n elements; harmless if there are none. The hardware prefetcher does not foresee
  // where the next row begins if a panel is narrower than its weight.
  void prefetch(int64_t element, int64_t n) const {
    constexpr int64_t kCacheLine = 64;
    for (int64_t i = 0; i < n * size; i += kCacheLine) {
      __builtin_prefetch(reinterpret_cast<const void*>(origin + element * size + i));
    }
  }

  const void* at(int64_t element) const { return reinterpret_cast<const void*>(origin + element * size); }
};

}  // namespace zerocast
