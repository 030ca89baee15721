// Stage roll_history: the amax history of delayed scaling (docs/formats/fp8_delayed.md). It handles
// a few floats a weight and needs no parallel region.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace zerocast::cpu {
namespace {

// The largest of n non-negative floats, as integers: their bits order alike, and the loop
// vectorises.
float largest(const float* values, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    most = std::max(most, bits);
  }
  float value;
  std::memcpy(&value, &most, sizeof(value));
  return value;
}

}  // namespace

void roll_history(const Format& format, const Table& table, const Bases& amaxes, const Bases& scales,
                  const Bases& histories) {
  const DefaultFloatingPoint ieee;
  const float numerator = std::ldexp(format.fp8_max(), -format.margin);
  const auto at = [](const Bases& bases, const Weight& weight, column::Column base, column::Column offset) {
    return reinterpret_cast<float*>(bases[weight[base]]) + weight[offset];
  };
  for (int64_t i = 0; i < table.size; ++i) {
    const float amax = *at(amaxes, table[i], column::AMAX_BASE, column::AMAX_OFFSET);
    float& scale = *at(scales, table[i], column::SCALE_BASE, column::SCALE_OFFSET);
    float* history = at(histories, table[i], column::HISTORY_BASE, column::HISTORY_OFFSET);
    const int64_t length = format.amax_history_len;
    const float last = amax != 0.0f ? amax : history[0];
    if (last == 0.0f) continue;
    const float chosen = format.most_recent ? last : std::max(last, largest(history + 1, length - 1));
    std::copy(history + 1, history + length, history);
    history[length - 1] = last;
    history[0] = 0.0f;
    scale = delayed_scale(chosen, numerator, scale);
  }
}

}  // namespace zerocast::cpu
