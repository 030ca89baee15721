// Stages adam_8bit and adam_8bit_cast: AdamW on pieces of weights whose moments are kept in 8 bits;
// amaxes of the new masters, and their codes, are made while these are still cached.
#include <algorithm>
#include <cmath>

#include "codec.h"
#include "cpu/adam.h"
#include "cpu/amax_walk.h"
#include "cpu/one_pass.h"
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

// Updates groups of pieces, which are parallel to the rows of the table.
struct MomentUpdate {
  GroupLoop update;
  const std::vector<cpu::Adam8bitState>& states;
  const Table& table;
  const cpu::Adam8bitStep& step;
  CutLargest cut_largest;

  // The owned elements of a row of a panel, as amax_walk.h does before it folds them. Panels begin
  // and end between groups.
  void operator()(const Panel& panel, int64_t row, Panel::Segment owned) const {
    if (owned.first >= owned.last) return;
    const Weight& weight = panel.weight;
    const MomentPiece& piece = step.pieces[(weight.row - table.rows) / column::WIDTH];
    const int64_t groups = piece.groups(), size = owned.last - owned.first;
    int64_t element = piece.start + row * panel.pitch + owned.first - weight.start();
    int64_t group = piece.group_of(element) - piece.group_of(piece.start);
    for (int64_t i = 0; i < size; ++group) {
      const int64_t n = std::min(size - i, kGroup - (owned.first + i) % kGroup);
      one_group(piece, group, groups, element + i, n, false);
      i += n;
    }
  }

  // The group of a piece, counted from its first one, that is cut.
  void finish(const MomentPiece& piece, int64_t group) const {
    const MomentGroups place(piece, group);
    one_group(piece, group, piece.groups(), place.element() + place.first(), place.last() - place.first(), true);
  }

 private:
  // `n` elements from `element` on, which are all that the piece has of the group.
  void one_group(const MomentPiece& piece, int64_t group, int64_t groups, int64_t element, int64_t n, bool finishes) const {
    const cpu::Adam8bitState& state = states[piece.base];
    const int64_t at = piece.offset + element - piece.start, cut = piece.cut(group, groups);
    float* const largest = cut < 0 ? nullptr : cut_largest.values + cut;
    update({state.master + at, reinterpret_cast<const void*>(state.grad.address + at * size_of(state.grad.dtype)),
            state.exp_avg + at, state.exp_avg_sq + at, state.scales + piece.scale + group,
            state.scales + piece.second_scale + group, largest, largest == nullptr ? nullptr : largest + cut_largest.count,
            n, element, key_of_step(piece.key, step.steps[piece.scalars]),
            reinterpret_cast<const AdamScalars*>(step.scalars)[piece.scalars], step.clip, finishes});
  }
};

}  // namespace
}  // namespace zerocast

#define ZC_LOOPS "adam_8bit.inc"
#include "cpu/at_every_level.h"
#define ZC_LOOPS "partial_amax.inc"
#include "cpu/at_every_level.h"
#define ZC_LOOPS "partial_cast.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {
namespace {

std::vector<Array> masters_of(const std::vector<Adam8bitState>& states) {
  std::vector<Array> masters;
  for (const Adam8bitState& state : states) masters.push_back({reinterpret_cast<uintptr_t>(state.master), Dtype::kFloat32});
  return masters;
}

}  // namespace

void adam_8bit(const Format& format, Dtype nominal, const std::vector<Adam8bitState>& states, const Table& table,
               const Adam8bitStep& step, Array packed, const CutLargest& cut_largest, bool finishes, int threads) {
  if (states.empty()) return;
  const MomentUpdate update{ZC_AT_LEVEL(group_loop)(states[0].grad.dtype), states, table, step, cut_largest};
  if (!finishes) {
    return walk_amaxes(format, nominal, masters_of(states), table, packed, threads, ZC_AT_LEVEL(amax_loops), update,
                       Pitch::kRow);
  }
  parallel_for(table.size, threads, [&](int64_t i) {
    const MomentPiece& piece = step.pieces[i];
    const int64_t last = piece.groups() - 1;
    if (piece.cut(0, last + 1) >= 0) update.finish(piece, 0);
    if (last > 0 && piece.cut_last >= 0) update.finish(piece, last);
  });
}

void adam_8bit_cast(const Format& format, Dtype nominal, const std::vector<Adam8bitState>& states, const Table& table,
                    const Adam8bitStep& step, Array packed, const Bases& row_data, int threads) {
  check_whole_blocks(format, table);
  if (states.empty()) return;
  const MomentUpdate update{ZC_AT_LEVEL(group_loop)(states[0].grad.dtype), states, table, step, {nullptr, 0}};
  const AmaxLoops amax_loops = ZC_AT_LEVEL(amax_loops)(Dtype::kFloat32, nominal, packed.dtype);
  const CastLoops cast_loops = ZC_AT_LEVEL(cast_loops)(Dtype::kFloat32, nominal, format.element);
  walk_in_one_pass(format, masters_of(states), table, packed, row_data, amax_loops, cast_loops, threads, update);
}

}  // namespace zerocast::cpu
