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
constexpr int64_t kLanes = 16;  // lanes of a vector, or of a few vectors

constexpr CodeValues kValues = code_values();

// The numbers of the elements of a group. Loops that count would build each vector from them.
struct Numbers {
  alignas(64) uint32_t of[kGroup];
};
constexpr Numbers numbers() {
  Numbers numbers{};
  for (uint32_t i = 0; i < kGroup; ++i) numbers.of[i] = i;
  return numbers;
}
constexpr Numbers kNumbers = numbers();

// Adding 1.5 * 2**23 to a small float rounds it to an integer in the low mantissa bits.
constexpr float kToWhole = 12582912.0f;
constexpr float kToWholeLessFour = kToWhole - 4.0f;
constexpr int32_t kLeastHeight = 0x41C60000;  // the bits of 24.75
// Their sum is 1 / 259**4. Products of the first with squares up to 259**2 are exact.
constexpr float kUnitHigh = 0x1.fp-33f;
constexpr float kUnitLow = static_cast<float>(1.0 / fourth_power(259) - kUnitHigh);
// Coefficients of the parabola with the smallest relative error (1/99) to 1 / x on [1/254, 2/254].
constexpr float kParabola[] = {254.0f * 210.0f / 99.0f, -254.0f * 254.0f * 144.0f / 99.0f,
                               254.0f * 254.0f * 254.0f * 32.0f / 99.0f};
// Codes whose places are that near to a boundary are found by their definition, in units of the
// distance between codes. Roundings on the way to a place move it by less.
constexpr float kDoubt = 0x1p-13f;
// The reciprocal of 254 times a smaller scale is a normal number.
constexpr float kLargestOrdinary = 0x1p118f;

// Whether all of a group is finite and at most its scale, by the bits of its largest number.
bool is_within(uint32_t largest_bits, float scale) {
  return scale < kLargestOrdinary && largest_bits <= static_cast<uint32_t>(bits_of(scale));
}

// The largest number of a group, of m without sign, or 0 if none is positive; `bits` are the largest ones.
template <bool kHasSign>
float largest_of(const float* x, uint32_t bits) {
  if (bits <= kInfinity) return float_of(static_cast<int32_t>(bits));
  float largest = 0.0f;
  for (int64_t i = 0; i < kGroup; ++i) {
    const float size = kHasSign ? std::fabs(x[i]) : x[i];
    largest = size > largest ? size : largest;
  }
  return largest;
}

// 0 for NaN and for numbers that are not positive.
float at_most(float size, float scale) {
  const float positive = size > 0.0f ? size : 0.0f;
  return positive < scale ? positive : scale;
}

// The largest one of `codes`, a power of two, whose value is at most `size`.
int32_t code_below(const float* values, int32_t codes, float size, float scale) {
  int32_t code = 0;
  for (int32_t step = codes / 2; step > 0; step /= 2) code += values[code + step] * scale <= size ? step : 0;
  return code;
}

// The codes of an element as they are defined, by scales that are not 0.
int32_t exact_first(float m, float scale) {
  const float size = at_most(std::fabs(m), scale);
  const int32_t code = code_below(kValues.first, 128, size, scale);
  const float low = kValues.first[code] * scale, high = kValues.first[code + 1] * scale;
  const int32_t rounded = code + static_cast<int32_t>(size - low > high - size);
  return m < 0.0f ? -rounded : rounded;
}

int32_t exact_second(float v, float scale, uint32_t random) {
  const float size = at_most(v, scale), share = static_cast<float>(random >> 8) * 0x1p-24f;
  const int32_t code = code_below(kValues.second, 256, size, scale);
  const float low = std::sqrt(kValues.second[code] * scale), high = std::sqrt(kValues.second[code + 1] * scale);
  const int32_t rounded = code + static_cast<int32_t>(std::sqrt(size) - low > share * (high - low));
  return size > 0.0f ? larger(rounded, 1) : 0;
}

// Elements of a weight that this rank has: of several whole groups, or of a part of one.
struct MomentRun {
  float* master;
  const void* grad;
  int8_t* first;
  uint8_t* second;
  float *first_scale, *second_scale;
  float *cut_first, *cut_second;  // largest values over all ranks; null where no rank has another part
  int64_t numel, element;         // the index of the first element in the whole weight
  uint32_t key;
  const AdamScalars& scalars;
  float clip;
  bool finishes;

  bool is_cut() const { return cut_first != nullptr; }
};

// Whether the random numbers of a group have one seed.
bool has_one_seed(int64_t element) { return element >> 32 == (element + kGroup - 1) >> 32; }

// Prefetches the memory of an element eight groups ahead, since the hardware prefetcher does not follow
// four streams. It is called for every 16 elements, which have one cache line of masters: prefetches of a
// whole group at once would wait for each other.
void prefetch_ahead(const MomentRun& run, int64_t element, int64_t gradient_bytes) {
  constexpr int64_t kAhead = 8 * kGroup, kLine = 64;
  const int64_t at = element + kAhead;
  __builtin_prefetch(run.master + at);
  __builtin_prefetch(static_cast<const char*>(run.grad) + at * gradient_bytes);
  if (element % kLine != 0) return;
  __builtin_prefetch(run.first + at);
  __builtin_prefetch(run.second + at);
}

using MomentLoop = void (*)(const MomentRun& run);

// Updates groups of pieces, which are parallel to the rows of the table.
struct MomentUpdate {
  MomentLoop update;
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
    const int64_t element = piece.start + row * panel.pitch + owned.first - weight.start();
    int64_t group = piece.group_of(element) - piece.group_of(piece.start);
    for (int64_t i = 0; i < size;) {
      const int64_t in_group = (owned.first + i) % kGroup, whole = in_group ? 0 : (size - i) / kGroup;
      const int64_t n = whole ? whole * kGroup : std::min(size - i, kGroup - in_group);
      one_run(piece, group, whole ? -1 : piece.cut(group, groups), element + i, n, false);
      group += whole ? whole : 1;
      i += n;
    }
  }

  // The group of a piece, counted from its first one, that is cut.
  void finish(const MomentPiece& piece, int64_t group) const {
    const MomentGroups place(piece, group);
    const int64_t cut = piece.cut(group, piece.groups());
    one_run(piece, group, cut, place.element() + place.first(), place.last() - place.first(), true);
  }

 private:
  // `n` elements from `element` on, from a group on that is the one of number `cut` among cut groups or
  // none for -1.
  void one_run(const MomentPiece& piece, int64_t group, int64_t cut, int64_t element, int64_t n, bool finishes) const {
    const cpu::Adam8bitState& state = states[piece.base];
    const int64_t at = piece.offset + element - piece.start;
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
  const MomentUpdate update{ZC_AT_LEVEL(moment_loop)(states[0].grad.dtype), states, table, step, cut_largest};
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
  const MomentUpdate update{ZC_AT_LEVEL(moment_loop)(states[0].grad.dtype), states, table, step, {nullptr, 0}};
  const AmaxLoops amax_loops = ZC_AT_LEVEL(amax_loops)(Dtype::kFloat32, nominal, packed.dtype);
  const CastLoops cast_loops = ZC_AT_LEVEL(cast_loops)(Dtype::kFloat32, nominal, format.element);
  walk_in_one_pass(format, masters_of(states), table, packed, row_data, amax_loops, cast_loops, threads, update);
}

}  // namespace zerocast::cpu
