// Stage adam_8bit: AdamW on pieces of weights whose moments are kept in 8 bits.
//
// A warp takes some neighbouring groups of 128 elements one after the other, a lane four neighbours of
// each. The loads of a group are under way while the group before it is computed.
#include "cuda/dispatch.cuh"
#include "cuda/moments.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpLanes, kLaneElements = 4;
constexpr int kGroupsOfWarp = kMomentGroups / kWarps;
constexpr int kMinBlocks = 4;  // a multiprocessor: 64 registers a thread
static_assert(kLaneElements * kWarpLanes == MomentPiece::kGroup && kGroupsOfWarp * kWarps == kMomentGroups);

__device__ const CodeValues kCodeValues = code_values();

__device__ void read_code_values(CodeValues& values) {
  static_assert(sizeof values.first == 4 * kThreads && sizeof values.second == 4 * (kThreads + 1));
  const int thread = static_cast<int>(threadIdx.x);
  values.first[thread] = kCodeValues.first[thread];
  values.second[thread] = kCodeValues.second[thread];
  if (thread == 0) values.second[kThreads] = kCodeValues.second[kThreads];
  __syncthreads();
}

// Four elements of a lane as they lie in memory; zeros for those that the piece does not have.
template <class Grad>
struct LaneElements {
  Four<Float32> p;
  Four<Grad> g;
  uint32_t m, v;  // codes
  float first_scale, second_scale;
};

// A lane's place in a group: the index in the weight of its first element, and which of the four the
// piece has.
struct LanePlace {
  int64_t element;
  int first, last;

  __device__ explicit LanePlace(const MomentGroups& group) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes * kLaneElements;
    element = group.element() + lane;
    first = group.first() - lane;
    last = group.last() - lane;
  }
  __device__ bool has(int i) const { return i >= first && i < last; }
  __device__ bool whole() const { return first <= 0 && last >= kLaneElements; }
};

// The tensors of a piece. Addresses are those of the weight's first element, which may not exist.
template <class Grad>
class PieceArrays {
 public:
  __device__ PieceArrays(const Adam8bitState& state, const MomentPiece& piece)
      : master_(reinterpret_cast<uint64_t>(state.master) + 4 * origin(piece)),
        grad_(state.grad.address + sizeof(typename Grad::Word) * origin(piece)),
        first_(reinterpret_cast<uint64_t>(state.exp_avg) + origin(piece)),
        second_(reinterpret_cast<uint64_t>(state.exp_avg_sq) + origin(piece)),
        first_scales_(state.scales + piece.scale),
        second_scales_(state.scales + state.scale_count + piece.scale),
        aligned_(piece.columns % 4 == 0 &&
                 (master_ % 16 | grad_ % (4 * sizeof(typename Grad::Word)) | first_ % 4 | second_ % 4) == 0) {}

  __device__ LaneElements<Grad> load(const LanePlace& at, int64_t group) const {
    LaneElements<Grad> x{};
    x.first_scale = first_scales_[group];
    x.second_scale = second_scales_[group];
    if (aligned_ && at.whole()) {
      x.p = Four<Float32>::load(p(at.element));
      x.g = Four<Grad>::load(g(at.element));
      x.m = *reinterpret_cast<const uint32_t*>(m(at.element));
      x.v = *reinterpret_cast<const uint32_t*>(v(at.element));
      return x;
    }
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (!at.has(i)) continue;
      x.p.words[i] = *p(at.element + i);
      x.g.words[i] = *g(at.element + i);
      x.m |= static_cast<uint32_t>(*m(at.element + i)) << 8 * i;
      x.v |= static_cast<uint32_t>(*v(at.element + i)) << 8 * i;
    }
    return x;
  }

  __device__ void store_masters(const LanePlace& at, const Four<Float32>& masters) const {
    if (aligned_ && at.whole()) return masters.store(p(at.element));
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (at.has(i)) *p(at.element + i) = masters.words[i];
    }
  }

  __device__ void store_codes(const LanePlace& at, uint32_t first, uint32_t second) const {
    if (aligned_ && at.whole()) {
      *reinterpret_cast<uint32_t*>(m(at.element)) = first;
      *reinterpret_cast<uint32_t*>(v(at.element)) = second;
      return;
    }
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (!at.has(i)) continue;
      *m(at.element + i) = static_cast<uint8_t>(first >> 8 * i);
      *v(at.element + i) = static_cast<uint8_t>(second >> 8 * i);
    }
  }

  // All lanes call it with the same scales, after each has loaded the old ones.
  __device__ void store_scales(int64_t group, float first, float second) const {
    __syncwarp();
    if (threadIdx.x % kWarpLanes != 0) return;
    first_scales_[group] = first;
    second_scales_[group] = second;
  }

 private:
  __device__ static int64_t origin(const MomentPiece& piece) { return piece.offset - piece.start; }
  __device__ uint32_t* p(int64_t e) const { return reinterpret_cast<uint32_t*>(master_) + e; }
  __device__ const typename Grad::Word* g(int64_t e) const {
    return reinterpret_cast<const typename Grad::Word*>(grad_) + e;
  }
  __device__ uint8_t* m(int64_t e) const { return reinterpret_cast<uint8_t*>(first_) + e; }
  __device__ uint8_t* v(int64_t e) const { return reinterpret_cast<uint8_t*>(second_) + e; }

  const uint64_t master_, grad_, first_, second_;
  float *const first_scales_, *const second_scales_;
  const bool aligned_;
};

// The elements of a lane with their fresh moments.
template <class Grad>
struct LaneMoments {
  Updated elements[kLaneElements];

  __device__ LaneMoments(const LaneElements<Grad>& x, const StepScalars& s, const CodeValues& values) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const float m = __fmul_rn(values.first[x.m >> 8 * i & 0xFF], x.first_scale);
      const float v = __fmul_rn(values.second[x.v >> 8 * i & 0xFF], x.second_scale);
      elements[i] = fresh(x.p[i], x.g[i], m, v, s.adam, s.clip);
    }
  }

  // Of a warp: the largest positive numbers, or 0. NaN is ignored. Positive floats are in the order of
  // their bits.
  __device__ float first_largest() const {
    float most = 0.0f;
#pragma unroll
    for (const Updated& x : elements) most = fmaxf(most, fabsf(x.m));
    return largest_of_warp(most);
  }
  __device__ float second_largest() const {
    float most = 0.0f;
#pragma unroll
    for (const Updated& x : elements) most = fmaxf(most, x.v);
    return largest_of_warp(most);
  }

 private:
  __device__ static float largest_of_warp(float most) {
    return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(most)));
  }
};

// The codes of four elements of a lane, as they are defined.
template <class Grad>
__device__ void store_exact_codes(const PieceArrays<Grad>& arrays, const LanePlace& at, const LaneMoments<Grad>& moments,
                                  const ExactGroup& exact, uint32_t key) {
  uint32_t first = 0, second = 0;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    first |= exact.first(moments.elements[i].m) << 8 * i;
    second |= exact.second(moments.elements[i].v, random_bits(key, at.element + i)) << 8 * i;
  }
  arrays.store_codes(at, first, second);
}

// A whole group: masters, codes and scales. A group that is cut: masters and its largest moments.
template <class Grad>
__device__ void update_group(const PieceArrays<Grad>& arrays, const LanePlace& at, const LaneElements<Grad>& x,
                             const StepScalars& s, uint32_t key, const CodeValues& values, int64_t group, float* cut,
                             int64_t cut_count) {
  const LaneMoments<Grad> moments(x, s, values);
  const float first_largest = moments.first_largest(), second_largest = moments.second_largest();
  const float first_scale = group_scale(first_largest), second_scale = group_scale(second_largest);
  const bool ordinary = s.ordinary && first_largest < 0x1p62f && second_largest < 0x1p62f;
  const QuickGroup quick(first_scale, second_scale);
  const ExactGroup exact(first_scale, second_scale, values);
  Four<Float32> masters;
  uint32_t first = 0, second = 0;
  // Elements of a lane may have different upper halves of their indices only where they straddle 2**32.
  const uint32_t upper_key = mix(key + static_cast<uint32_t>(at.element >> 32)), lower = static_cast<uint32_t>(at.element);
  const bool straddles = lower > UINT32_MAX - kLaneElements;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const Updated& element = moments.elements[i];
    const uint32_t random = mix(upper_key + lower + i);
    QuickGroup::Result result = quick.update(element, s, random);
    if (!ordinary || result.doubtful_update) result.p = stepped(element, s.adam);
    if (!ordinary || straddles || result.doubtful_update || result.doubtful_codes) {
      result.first = exact.first(element.m);
      result.second = exact.second(element.v, random_bits(key, at.element + i));
    }
    masters.words[i] = Float32::narrow(result.p);
    first |= result.first << 8 * i;
    second |= result.second << 8 * i;
  }
  arrays.store_masters(at, masters);
  if (cut != nullptr) {
    if (threadIdx.x % kWarpLanes != 0) return;
    cut[0] = first_largest;
    cut[cut_count] = second_largest;
    return;
  }
  arrays.store_codes(at, first, second);
  arrays.store_scales(group, first_scale, second_scale);
}

template <class Grad>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    adam_8bit_kernel(Adam8bitState state, const MomentPiece* pieces, const Item* items, AdamInputs adam,
                     const int64_t* step) {
  if (holds(adam.skip)) return;
  __shared__ CodeValues values;
  const Item item = items[blockIdx.x];
  const MomentPiece piece = pieces[item.weight];
  const StepScalars s(adam.rows[piece.scalars], *adam.clip);
  const uint32_t key = key_of_step(piece.key, *step);
  read_code_values(values);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int64_t count = piece.groups(), first = static_cast<int64_t>(item.ordinal) * kMomentGroups + warp * kGroupsOfWarp;
  const int64_t last = min(first + kGroupsOfWarp, count);
  if (first >= last) return;
  const PieceArrays<Grad> arrays(state, piece);
  MomentGroups groups(piece, first);
  LanePlace place(groups);
  LaneElements<Grad> elements = arrays.load(place, first);
#pragma unroll 1
  for (int64_t group = first; group < last; ++group) {
    groups.advance();
    const LanePlace next_place(groups);
    LaneElements<Grad> next{};
    if (group + 1 < last) next = arrays.load(next_place, group + 1);
    const int64_t cut = piece.cut(group, count);
    update_group(arrays, place, elements, s, key, values, group, cut < 0 ? nullptr : state.cut_largest + cut,
                 state.cut_count);
    place = next_place;
    elements = next;
  }
}

// The codes and scales of the groups at both ends of a piece, where they are cut: a warp each.
template <class Grad>
__global__ void __launch_bounds__(kThreads)
    adam_8bit_cut_kernel(Adam8bitState state, const MomentPiece* pieces, AdamInputs adam, const int64_t* step) {
  if (holds(adam.skip)) return;
  __shared__ CodeValues values;
  const MomentPiece piece = pieces[blockIdx.x];
  if (max(piece.cut_first, piece.cut_last) < 0) return;
  read_code_values(values);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int64_t count = piece.groups(), group = warp == 0 ? 0 : count - 1, cut = piece.cut(group, count);
  if (warp > 1 || (warp == 1 && count == 1) || cut < 0) return;
  const StepScalars s(adam.rows[piece.scalars], *adam.clip);
  const PieceArrays<Grad> arrays(state, piece);
  const LanePlace place(MomentGroups(piece, group));
  const LaneMoments<Grad> moments(arrays.load(place, group), s, values);
  const float first_scale = group_scale(state.cut_largest[cut]),
              second_scale = group_scale(state.cut_largest[state.cut_count + cut]);
  store_exact_codes(arrays, place, moments, ExactGroup(first_scale, second_scale, values), key_of_step(piece.key, *step));
  arrays.store_scales(group, first_scale, second_scale);
}

}  // namespace

void adam_8bit(const Adam8bitState& state, const Work& pieces, const AdamStep& step, uintptr_t number, bool finishes,
               Stream stream) {
  const auto* rows = reinterpret_cast<const MomentPiece*>(pieces.table);
  const auto* steps = reinterpret_cast<const int64_t*>(number);
  const auto go = [&](auto grad) {
    using Grad = decltype(grad);
    if (finishes) {
      launch(adam_8bit_cut_kernel<Grad>, pieces.weights, kThreads, stream, state, rows, inputs_of(step), steps);
    } else {
      launch(adam_8bit_kernel<Grad>, pieces.blocks, kThreads, stream, state, rows, items_of(pieces), inputs_of(step), steps);
    }
  };
  if (state.grad.dtype == Dtype::kFloat32) return go(Float32{});
  if (state.grad.dtype == Dtype::kBfloat16) return go(Bfloat16{});
  throw std::invalid_argument("gradients are float32 or bfloat16");
}

}  // namespace zerocast::cuda
