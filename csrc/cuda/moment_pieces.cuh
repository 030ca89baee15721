// AdamW on pieces of weights whose moments are kept in 8 bits, for adam_8bit and adam_8bit_cast.
//
// A warp processes some groups of 128 elements one at a time, a lane four neighbours of each. The
// next groups come into shared memory meanwhile. The warps of a thread block take turns with groups
// that follow each other, or for formats with blocks a warp's groups are below each other, as the
// rows of a panel of adam_amax.
#pragma once

#include "cuda/amax.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/moments.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kThreads = kAmaxShape.threads(), kWarps = kAmaxShape.warps, kLaneElements = kAmaxShape.lane_columns;
constexpr int kGroupsOfWarp = kMomentGroups / kWarps;
static_assert(kLaneElements * kWarpLanes == MomentPiece::kGroup && kGroupsOfWarp * kWarps == kMomentGroups);

__device__ const CodeValues kCodeValues = code_values();

// The values of codes of a thread, which are loaded at once, and stored when they have come.
class CodeValuesOfThread {
 public:
  __device__ CodeValuesOfThread() : first_(kCodeValues.first[threadIdx.x]), second_(kCodeValues.second[threadIdx.x]) {}

  // The whole thread block calls it.
  __device__ void store(CodeValues& values) const {
    static_assert(sizeof values.first == 4 * kThreads && sizeof values.second == 4 * (kThreads + 1));
    values.first[threadIdx.x] = first_;
    values.second[threadIdx.x] = second_;
    if (threadIdx.x == 0) values.second[kThreads] = kCodeValues.second[kThreads];
    __syncthreads();
  }

 private:
  const float first_, second_;
};

// Four elements of a lane as they lie in memory; zeros for those that the piece does not have.
template <class Grad>
struct LaneElements {
  Four<Float32> p;
  Four<Grad> g;
  uint32_t m, v;  // codes
};

// The updated values of LaneMoments.
struct LaneResults {
  Four<Float32> masters;
  uint32_t first, second;  // codes
};

// A lane's place in a group: the index in the weight of its first element, and which of the four the
// piece has.
struct LanePlace {
  int64_t element;
  int first, last;

  // For a group that begins at `group`, of which the piece has [first, last).
  __device__ LanePlace(int64_t group, int first, int last) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes * kLaneElements;
    element = group + lane;
    this->first = first - lane;
    this->last = last - lane;
  }
  __device__ bool has(int i) const { return i >= first && i < last; }
  __device__ bool whole() const { return first <= 0 && last >= kLaneElements; }
};

// Where a lane's elements lie.
template <class Grad>
struct LanePointers {
  uint32_t* p;
  const typename Grad::Word* g;
  uint8_t *m, *v;

  // The same of element `offset` from here.
  __device__ LanePointers at(int64_t offset) const { return {p + offset, g + offset, m + offset, v + offset}; }
  // The same of element `4 * fours`: an address is one instruction, a product of 32 bits and a sum.
  __device__ LanePointers later(uint32_t fours) const {
    const uint64_t offset = uint64_t{fours} * kLaneElements;
    return {p + offset, g + offset, m + offset, v + offset};
  }

  // True if four elements may be read and written at once.
  __device__ bool aligned() const {
    const auto off = [](const void* at, int bytes) { return reinterpret_cast<uint64_t>(at) % bytes; };
    return (off(p, 16) | off(g, 4 * sizeof(typename Grad::Word)) | off(m, 4) | off(v, 4)) == 0;
  }

  __device__ LaneElements<Grad> load() const {
    return {Four<Float32>::load(p), Four<Grad>::load(g), *reinterpret_cast<const uint32_t*>(m),
            *reinterpret_cast<const uint32_t*>(v)};
  }
  __device__ LaneElements<Grad> load(const LanePlace& place) const {
    if (place.whole() && aligned()) return load();
    LaneElements<Grad> x{};
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (!place.has(i)) continue;
      x.p.words[i] = p[i];
      x.g.words[i] = g[i];
      x.m |= static_cast<uint32_t>(m[i]) << 8 * i;
      x.v |= static_cast<uint32_t>(v[i]) << 8 * i;
    }
    return x;
  }

  // One store: the compiler makes four of words that are chosen one by one.
  __device__ void store_masters(const LaneResults& x) const {
    const uint4 bits = x.masters.bits();
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(bits.x), "r"(bits.y),
                 "r"(bits.z), "r"(bits.w)
                 : "memory");
  }
  __device__ void store_masters(const LaneResults& x, const LanePlace& place) const {
    if (place.whole() && aligned()) return store_masters(x);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (place.has(i)) p[i] = x.masters.words[i];
    }
  }

  __device__ void store_codes(const LaneResults& x) const {
    *reinterpret_cast<uint32_t*>(m) = x.first;
    *reinterpret_cast<uint32_t*>(v) = x.second;
  }
  __device__ void store_codes(const LaneResults& x, const LanePlace& place) const {
    if (place.whole() && aligned()) return store_codes(x);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (!place.has(i)) continue;
      m[i] = static_cast<uint8_t>(x.first >> 8 * i);
      v[i] = static_cast<uint8_t>(x.second >> 8 * i);
    }
  }
};

// The next kStages groups of a warp, on their way into shared memory: each lane copies its own
// elements. In registers they would leave too few for the arithmetic, and with one group ahead the
// memory of an H200 waits for the warps: then even a kernel without arithmetic takes 1.10 times as long
// as a copy.
template <class Grad, int kStages>
class WarpRing {
  struct Group {
    uint32_t masters[MomentPiece::kGroup];
    typename Grad::Word grads[MomentPiece::kGroup];
    uint8_t first[MomentPiece::kGroup], second[MomentPiece::kGroup];
  };

 public:
  // The dynamic shared memory of a thread block.
  static constexpr int kBytes = kWarps * kStages * static_cast<int>(sizeof(Group));

  __device__ WarpRing() {
    extern __shared__ __align__(16) uint8_t groups[];
    groups_ = reinterpret_cast<Group*>(groups) + threadIdx.x / kWarpLanes * kStages;
  }

  // Starts to load the elements of a lane that lie at `from`, once those of the stage are taken.
  __device__ void load(int stage, const LanePointers<Grad>& from) const {
    const LanePointers<Grad> to = of_lane(stage);
    copy<sizeof(Four<Float32>)>(to.p, from.p);
    copy<sizeof(Four<Grad>)>(to.g, from.g);
    copy<sizeof(uint32_t)>(to.m, from.m);
    copy<sizeof(uint32_t)>(to.v, from.v);
  }
  // Ends the loads of a stage, of which there may be none.
  __device__ void commit() const { asm volatile("cp.async.commit_group;" ::: "memory"); }

  // Waits for the stage of which the loads ended kStages calls of `commit` ago.
  __device__ LaneElements<Grad> take(int stage) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    return of_lane(stage).load();
  }

 private:
  __device__ LanePointers<Grad> of_lane(int stage) const {
    Group& group = groups_[stage];
    return LanePointers<Grad>{group.masters, group.grads, group.first, group.second}.later(threadIdx.x % kWarpLanes);
  }

  template <int kBytes>
  __device__ static void copy(const void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from)), "n"(kBytes)
                 : "memory");
  }

  Group* groups_;
};

// Lists that the bases of pieces are indices of.
struct PieceBases {
  BaseList master, grad, exp_avg, exp_avg_sq, scales;
};

inline PieceBases piece_bases(const Adam8bitState& state) {
  return {bases_of(state.masters), bases_of(state.grads.address), bases_of(state.exp_avgs), bases_of(state.exp_avg_sqs),
          bases_of(state.scales)};
}

// The tensors of a piece: at the weight's first element, which may not exist, and at the scales of
// its first group.
template <class Grad>
struct PieceArrays {
  LanePointers<Grad> elements;
  float *first_scales, *second_scales;

  __device__ PieceArrays(const PieceBases& bases, const MomentPiece& piece) {
    const int64_t base = piece.base, origin = piece.offset - piece.start;
    elements.p = reinterpret_cast<uint32_t*>(bases.master.addresses[base]) + origin;
    elements.g = reinterpret_cast<const typename Grad::Word*>(bases.grad.addresses[base]) + origin;
    elements.m = reinterpret_cast<uint8_t*>(bases.exp_avg.addresses[base]) + origin;
    elements.v = reinterpret_cast<uint8_t*>(bases.exp_avg_sq.addresses[base]) + origin;
    auto* const scales = reinterpret_cast<float*>(bases.scales.addresses[base]);
    first_scales = scales + piece.scale;
    second_scales = scales + piece.second_scale;
  }

  __device__ GroupPair scales(int64_t group) const { return {first_scales[group], second_scales[group]}; }
  // All lanes call it, after each has loaded the old ones.
  __device__ void store_scales(int64_t group, const GroupPair& scales) const {
    __syncwarp();
    if (threadIdx.x % kWarpLanes != 0) return;
    first_scales[group] = scales.first;
    second_scales[group] = scales.second;
  }
};

// The random bits of neighbouring elements of a weight.
struct Randoms {
  uint32_t lower, upper_key, next_upper_key;

  __device__ Randoms(uint32_t key, int64_t element)
      : lower(static_cast<uint32_t>(element)),
        upper_key(mix(key + static_cast<uint32_t>(element >> 32))),
        next_upper_key(mix(key + static_cast<uint32_t>(element >> 32) + 1)) {}
  __device__ uint32_t operator[](int i) const { return mix(seeded(i)); }
  // A word with the upper 16 bits of the complement.
  __device__ uint32_t complement(int i) const { return mix_complement(seeded(i)); }

 private:
  __device__ uint32_t seeded(int i) const {
    const uint32_t element = lower + i;
    return (element < lower ? next_upper_key : upper_key) + element;
  }
};

// The value of byte `i` of some codes. A product of bytes is the offset of its entry in the table.
__device__ float value_of(const float* table, uint32_t codes, int i) {
  return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) + __dp4a(codes, 4u << 8 * i, 0u));
}

// The elements of a lane with their fresh moments.
template <class Grad>
class LaneMoments {
 public:
  __device__ LaneMoments(const LaneElements<Grad>& x, const GroupPair& scales, const StepScalars& s,
                         const CodeValues& values) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const float m = __fmul_rn(value_of(values.first, x.m, i), scales.first);
      const float v = __fmul_rn(value_of(values.second, x.v, i), scales.second);
      elements_[i] = fresh(x.p[i], x.g[i], m, v, s.adam, s.clip);
    }
  }

  // The largest positive numbers of a warp, or 0. NaN is ignored.
  __device__ GroupPair largest() const {
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (const Updated& x : elements_) {
      first = fmaxf(first, fabsf(x.m));
      second = fmaxf(second, x.v);
    }
    return {largest_of_warp(first), largest_of_warp(second)};
  }

  // The same in fewer instructions; NaN, which no ordinary group has, if one of the moments is.
  __device__ GroupPair ordinary_largest() const {
    const auto& [a, b, c, d] = elements_;
    const float first = greater_or_nan(greater_or_nan(fabsf(a.m), fabsf(b.m)), greater_or_nan(fabsf(c.m), fabsf(d.m)));
    const uint32_t second = __vimax3_u32(bits(a.v), bits(b.v), max(bits(c.v), bits(d.v)));
    return {largest_of_warp(first), largest_of_warp(__uint_as_float(second))};
  }

  // True if QuickGroup may be wrong about an element of an ordinary group whatever its places are.
  __device__ static bool is_small(const Updated& x) { return !(fabsf(x.m) >= kOrdinaryLeast) || !(x.v >= kOrdinaryLeast); }
  // The same for all elements.
  __device__ bool has_small() const {
    const auto& [a, b, c, d] = elements_;
    const uint32_t ab = bits(fminf(fabsf(a.m), fabsf(b.m))), cd = bits(fminf(fabsf(c.m), fabsf(d.m)));
    return __vimin3_u32(__vimin3_u32(bits(a.v), bits(b.v), ab), __vimin3_u32(bits(c.v), bits(d.v), cd),
                        bits(kOrdinaryLeast)) < bits(kOrdinaryLeast);
  }

  __device__ const Updated& operator[](int i) const { return elements_[i]; }

  // The same for an index that the compiler does not know: registers cannot be indexed.
  __device__ Updated any(int i) const {
    const Updated lower = i == 0 ? elements_[0] : elements_[1], upper = i == 2 ? elements_[2] : elements_[3];
    return i < 2 ? lower : upper;
  }

 private:
  __device__ static uint32_t bits(float x) { return __float_as_uint(x); }

  Updated elements_[kLaneElements];
};

__device__ GroupPair scales_of(const GroupPair& largest) {
  return {group_scale(largest.first), group_scale(largest.second)};
}

// The largest moments of a group, and whether QuickGroup takes it.
struct Group {
  GroupPair largest;
  bool ordinary;

  template <class Grad>
  __device__ Group(const LaneMoments<Grad>& moments, const StepScalars& s) {
    largest = moments.ordinary_largest();
    ordinary = s.is_ordinary(largest.first) && s.is_ordinary(largest.second);
    if (!ordinary) largest = moments.largest();
  }
};

// Overwrites elements whose bits are set by the exact results.
template <class Grad>
__device__ void update_exactly(uint32_t which, const LaneMoments<Grad>& moments, const GroupPair& scales,
                               const StepScalars& s, const CodeValues& values, const Randoms& randoms, LaneResults& to) {
  const ExactGroup exact(scales.first, scales.second, values);
#pragma unroll 1
  for (int i = 0; i < kLaneElements; ++i) {
    if ((which >> i & 1) == 0) continue;
    const Updated x = moments.any(i);
    const uint32_t master = Float32::narrow(stepped(x, s.adam)), byte = 0xFFu << 8 * i;
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) to.masters.words[k] = k == i ? master : to.masters.words[k];
    to.first = (to.first & ~byte) | exact.first(x.m) << 8 * i;
    to.second = (to.second & ~byte) | exact.second(x.v, randoms[i]) << 8 * i;
  }
}

// Updates elements of a group.
template <class Grad>
__device__ LaneResults update(const LaneMoments<Grad>& moments, const Group& group, const StepScalars& s,
                              const CodeValues& values, const Randoms& randoms) {
  // These are the scales, or else all elements of the group are small.
  const QuickGroup quick(group.largest);
  LaneResults to;
  uint32_t firsts[kLaneElements], seconds[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const QuickGroup::Result result = quick.update(moments[i], s, randoms.complement(i));
    to.masters.words[i] = Float32::narrow(result.p);
    firsts[i] = result.first;
    seconds[i] = result.second;
  }
  to.first = negate_bytes(third_bytes(firsts), sign_bytes(moments[0].m, moments[1].m, moments[2].m, moments[3].m));
  to.second = third_bytes(seconds);
  const auto near = [](uint32_t least) { return (least & 0xFFFFu) < QuickGroup::kDoubt; };
  const uint32_t least =
      least_half(least_half(firsts[0], firsts[1], firsts[2]), least_half(firsts[3], seconds[0], seconds[1]),
                 least_half(seconds[2], seconds[3], seconds[3]));
  if (!group.ordinary || moments.has_small() || near(least)) {
    uint32_t doubtful = 0;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const bool doubts = near(firsts[i]) || near(seconds[i]) || moments.is_small(moments[i]);
      doubtful |= !group.ordinary || doubts ? 1u << i : 0;
    }
    update_exactly(doubtful, moments, scales_of(group.largest), s, values, randoms, to);
  }
  return to;
}

// The distance of a warp's groups where the warps of a thread block take turns: what they read and
// write at one time lies together.
struct TakingTurns {
  __device__ operator int64_t() const { return kWarps * MomentPiece::kGroup; }
};

// The values that all groups of a piece share in a step.
template <class Grad>
struct PieceStep {
  const CutLargest& cuts;
  const MomentPiece& piece;
  const PieceArrays<Grad> arrays;
  const StepScalars s;
  const CodeValues& values;
  const uint32_t key;

  __device__ PieceStep(const PieceBases& bases, const CutLargest& cuts, const MomentPiece& piece, const AdamInputs& adam,
                       const int64_t* steps, const CodeValues& values)
      : cuts(cuts),
        piece(piece),
        arrays(bases, piece),
        s(adam.rows[piece.scalars], *adam.clip),
        values(values),
        key(key_of_step(piece.key, steps[piece.scalars])) {}

  // True if kGroups groups, `stride` elements apart from `element` on, are whole and may be read and
  // written four elements at once. Distances and random numbers of their elements take 31 bits.
  template <int kGroups>
  __device__ bool takes_whole(int64_t element, int64_t stride) const {
    const int64_t end = element + (kGroups - 1) * stride + MomentPiece::kGroup;
    return piece.whole_groups() && element >= piece.start && end <= piece.start + piece.numel &&
           element >> 31 == end >> 31 && arrays.elements.at(element).aligned();
  }

  // Updates such groups, the first of which is `group`, counted from the first one of the piece. They
  // are rows of the amaxes from `row` on. A lane holds one of their scales. `stride` is an int64_t or a
  // constant.
  template <int kGroups, int kStages, class Stride, class Amaxes>
  __device__ void whole_groups(int64_t group, int64_t element, Stride stride, const AmaxPlace& panel, int row,
                               Amaxes& amaxes) const {
    static_assert(2 * kGroups <= kWarpLanes && kGroups >= kStages);
    constexpr bool kConstant = !std::is_same_v<Stride, int64_t>;
    const int64_t apart = stride;
    const uint32_t step = static_cast<uint32_t>(apart), fours = step / kLaneElements;
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    const LanePointers<Grad> origin = arrays.elements.at(element + lane * kLaneElements);
    Randoms randoms(key, element + lane * kLaneElements);
    randoms.next_upper_key = randoms.upper_key;
    float* const scale = (lane < kGroups ? arrays.first_scales : arrays.second_scales) + group +
                         lane % kGroups * (apart / MomentPiece::kGroup);
    float old_scale = lane < 2 * kGroups ? *scale : 0.0f, new_largest = 0.0f;
    // Distances that are not constant are added to the first place: moving on takes more registers.
    LanePointers<Grad> here = origin;
    uint32_t offset = 0;
    const auto at = [&](int k) { return kConstant ? here.later(k * fours) : origin.later(offset + k * fours); };
    const WarpRing<Grad, kStages> ring;
#pragma unroll
    for (int k = 0; k < kStages; ++k) {
      ring.load(k, at(k));
      ring.commit();
    }
    uint32_t most = 0;
    int stage = 0;
    // Not unrolled: the update of a group is long.
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
      const LaneElements<Grad> loaded = ring.take(stage);
      if (i + kStages < kGroups) ring.load(stage, at(kStages));
      ring.commit();
      const GroupPair old{__shfl_sync(0xFFFFFFFFu, old_scale, i), __shfl_sync(0xFFFFFFFFu, old_scale, kGroups + i)};
      const LaneMoments<Grad> moments(loaded, old, s, values);
      const Group found(moments, s);
      const LaneResults results = update(moments, found, s, values, randoms);
      at(0).store_masters(results);
      at(0).store_codes(results);
      const AmaxRow x{results.masters[0], results.masters[1], results.masters[2], results.masters[3]};
      if constexpr (Amaxes::kTakesMost) {
        amaxes.finite_row(row + i, x);
        most = __vimax3_u32(most, __float_as_uint(greater_or_nan(fabsf(x[0]), fabsf(x[1]))),
                            __float_as_uint(greater_or_nan(fabsf(x[2]), fabsf(x[3]))));
      } else {
        amaxes.row(panel, row + i, x);
      }
      new_largest = lane % kGroups == i ? (lane < kGroups ? found.largest.first : found.largest.second) : new_largest;
      randoms.lower += step;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (kConstant) {
        here = here.later(fours);
      } else {
        offset += fours;
      }
    }
    if (lane < 2 * kGroups) *scale = group_scale(new_largest);
    if constexpr (Amaxes::kTakesMost) {
      if (most < static_cast<uint32_t>(kInfinity)) return amaxes.finite_rows(__uint_as_float(most));
      const LanePointers<Grad> first = arrays.elements.at(element + lane * kLaneElements);
#pragma unroll 1
      for (int i = 0; i < kGroups; ++i) {
        const Four<Float32> p = Four<Float32>::load(first.later(i * fours).p);
        amaxes.row(panel, row + i, {p[0], p[1], p[2], p[3]});
      }
    }
  }

  // Updates one group of any size, of `count`. A cut one keeps its codes, and its largest values are
  // entered.
  template <class Amaxes>
  __device__ void any_group(int64_t group, int64_t count, const LanePlace& place, const AmaxPlace& panel, int row,
                            Amaxes& amaxes) const {
    const LanePointers<Grad> at = arrays.elements.at(place.element);
    const LaneMoments<Grad> moments(at.load(place), arrays.scales(group), s, values);
    const Group found(moments, s);
    const LaneResults results = update(moments, found, s, values, Randoms(key, place.element));
    at.store_masters(results, place);
    AmaxRow p;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) p[i] = place.has(i) ? results.masters[i] : 0.0f;
    amaxes.row(panel, row, p);
    const int64_t cut = piece.cut(group, count);
    if (cut < 0) {
      at.store_codes(results, place);
      arrays.store_scales(group, scales_of(found.largest));
    } else if (threadIdx.x % kWarpLanes == 0) {
      cuts.values[cut] = found.largest.first;
      cuts.values[cuts.count + cut] = found.largest.second;
    }
  }
};

// Updates the groups of a warp, of a format with blocks: rows of a panel. The weight of the table may be the lower rows of
// the piece's.
template <int kRows, int kStages, class Grad, class Amaxes>
__device__ void update_panel(const PieceStep<Grad>& step, const AmaxPlace& panel, Amaxes& amaxes) {
  constexpr int kGroups = kPanelRows;
  const AmaxLane& lane = panel.lane;
  const MomentPiece& piece = step.piece;
  const int64_t in_group = threadIdx.x % kWarpLanes * kLaneElements, column = lane.column - in_group;
#pragma unroll 1
  for (int row = 0; row < kRows; row += kGroups) {
    const int64_t element = piece.start - lane.start + lane.element - in_group + row * lane.pitch;
    const int64_t group = piece.group_of(element) - piece.group_of(piece.start);
    if (step.template takes_whole<kGroups>(element, lane.pitch)) {
      step.template whole_groups<kGroups, kStages>(group, element, lane.pitch, panel, row, amaxes);
      continue;
    }
    const int64_t count = piece.groups();
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
      const int64_t e = element + i * lane.pitch, stop = piece.start + piece.numel;
      const int64_t first = max(piece.start - e, int64_t{0}),
                    last = min(min(stop - e, lane.columns - column), int64_t{MomentPiece::kGroup});
      if (first >= last) continue;
      const LanePlace place(e, static_cast<int>(first), static_cast<int>(last));
      step.any_group(group + i * piece.groups_across(), count, place, panel, row + i, amaxes);
    }
  }
}

}  // namespace
}  // namespace zerocast::cuda
