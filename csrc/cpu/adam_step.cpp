// Stage adam_step: AdamW on flat shards, all segments in one parallel region.
#include <algorithm>
#include <vector>

#include "codec.h"
#include "cpu/adam.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stages.h"

namespace zerocast {
namespace {

// One row of `segments`.
struct Segment {
  int64_t offset, numel, scalars;
};

}  // namespace
}  // namespace zerocast

#define ZC_LOOPS "adam_step.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {
namespace {

constexpr int64_t kRun = 32 * 1024;

std::vector<Segment> runs_of(const Segment* segments, int64_t count) {
  std::vector<Segment> runs;
  for (const Segment* s = segments; s < segments + count; ++s) {
    for (int64_t i = 0; i < s->numel; i += kRun) {
      runs.push_back({s->offset + i, std::min(kRun, s->numel - i), s->scalars});
    }
  }
  return runs;
}

}  // namespace

void adam_step(const AdamState& state, const int64_t* segments, int64_t count, const float* scalars, float clip,
               int threads) {
  const std::vector<Segment> runs = runs_of(reinterpret_cast<const Segment*>(segments), count);
  const AdamLoop update = ZC_AT_LEVEL(adam_loop)(state.grad.dtype, state.exp_avg.dtype);
  parallel_for(static_cast<int64_t>(runs.size()), threads, [&](int64_t i) {
    const Segment& run = runs[i];
    const auto& row = reinterpret_cast<const AdamScalars*>(scalars)[run.scalars];
    update_run(update, state, run.offset, run.numel, row, clip);
  });
}

}  // namespace zerocast::cpu
