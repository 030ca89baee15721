// The message of a gradient from one rank to another in FP8, for host and device: GradientMessage
// of zerocast/formats/layout.py.
#pragma once

#include "descriptor.h"

namespace zerocast {

constexpr int kGradientGroup = 128;

struct GradientMessage {
  int64_t numel;

  ZC_HD int64_t groups() const { return (numel + kGradientGroup - 1) / kGradientGroup; }
  ZC_HD int64_t scales_at() const { return round_up(numel, 16); }
  ZC_HD int64_t scales_end() const { return scales_at() + 4 * groups(); }
  ZC_HD int64_t bytes() const { return round_up(scales_end(), 16); }
};

}  // namespace zerocast
