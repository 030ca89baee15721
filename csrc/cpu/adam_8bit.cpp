// Stage adam_8bit: AdamW on pieces of weights whose moments are kept in 8 bits.
#include <algorithm>
#include <cmath>
#include <vector>

#include "codec.h"
#include "cpu/adam.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stages.h"
#include "moments.h"

namespace zerocast {
namespace {

constexpr int64_t kGroup = MomentPiece::kGroup;
constexpr MomentValues kValues = moment_values();

// 0 for NaN and for numbers that are not positive.
ZC_HD float at_most(float size, float scale) {
  const float positive = size > 0.0f ? size : 0.0f;
  return positive < scale ? positive : scale;
}

ZC_HD int32_t clamped(int32_t code, int32_t last) { return smaller(larger(code, 0), last); }

// A code of `ratio` of the scale that differs by one at most.
ZC_HD int32_t second_guess(float ratio) {
  return static_cast<int32_t>(259.0f * __builtin_sqrtf(__builtin_sqrtf(ratio)) - 4.0f);
}

// The elements of one group that this rank has.
struct GroupWork {
  float* master;
  const void* grad;
  int8_t* first;
  uint8_t* second;
  float *first_scale, *second_scale;
  float *cut_first, *cut_second;  // largest values over all ranks; null for a group that is here in whole
  int64_t numel, element;         // the index of the first element in the whole weight
  uint32_t key;
  const AdamScalars& scalars;
  float clip;
  bool finishes;
};

using GroupLoop = void (*)(const GroupWork& work);

struct Run {
  const MomentPiece* piece;
  int64_t first_group, last_group;  // counted from the first group of the piece
};

constexpr int64_t kRunGroups = 256;

}  // namespace
}  // namespace zerocast

#define ZC_LOOPS "adam_8bit.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {

void adam_8bit(const Adam8bitState& state, const MomentPiece* pieces, int64_t count, const float* scalars, float clip,
               int64_t step, bool finishes, int threads) {
  std::vector<Run> runs;
  for (const MomentPiece* piece = pieces; piece < pieces + count; ++piece) {
    const int64_t groups = piece->groups();
    if (!finishes) {
      for (int64_t i = 0; i < groups; i += kRunGroups) runs.push_back({piece, i, std::min(groups, i + kRunGroups)});
      continue;
    }
    if (piece->cut_first >= 0) runs.push_back({piece, 0, 1});
    if (piece->cut_last >= 0 && groups > 1) runs.push_back({piece, groups - 1, groups});
  }
  const GroupLoop update = ZC_AT_LEVEL(group_loop)(state.grad.dtype);
  parallel_for(static_cast<int64_t>(runs.size()), threads, [&](int64_t i) {
    const MomentPiece& piece = *runs[i].piece;
    const int64_t groups = piece.groups();
    const auto& row = reinterpret_cast<const AdamScalars*>(scalars)[piece.scalars];
    const uint32_t key = key_of_step(piece.key, step);
    MomentGroups place(piece, runs[i].first_group);
    for (int64_t group = runs[i].first_group; group < runs[i].last_group; ++group, place.advance()) {
      const int64_t first = place.element() + place.first(), last = place.element() + place.last();
      const int64_t at = piece.offset + first - piece.start, scale = piece.scale + group;
      const int64_t cut = piece.cut(group, groups);
      float* const largest = cut < 0 ? nullptr : state.cut_largest + cut;
      update({state.master + at, reinterpret_cast<const void*>(state.grad.address + at * size_of(state.grad.dtype)),
              state.exp_avg + at, state.exp_avg_sq + at, state.scales + scale, state.scales + state.scale_count + scale,
              largest, largest == nullptr ? nullptr : largest + state.cut_count, last - first, first, key, row, clip,
              finishes});
    }
  });
}

}  // namespace zerocast::cpu
