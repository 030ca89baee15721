// Stage adam_cast: the update of adam_step over whole rows of blocks, the amaxes of the updated
// masters, and their codes, from one read.
//
// A thread block takes 128 x 128 elements, a lane four columns of some rows of them. What a lane has
// updated stays in shared memory, rounded to the nominal dtype, until the thread block knows the
// amaxes of its blocks.
#include "cuda/adam.cuh"
#include "cuda/amax.cuh"
#include "cuda/codes.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kColumns = kOnePassShape.lane_columns, kWarps = kOnePassShape.warps, kRows = kOnePassRows;
constexpr int kMinBlocks = 2;  // a multiprocessor: 64 registers a thread, which do not spill

using OnePassLane = Lane<kColumns>;

struct FourElements {
  float2 a, b;
};

// Four neighbouring elements of each row of a lane, rounded to the nominal dtype of 16 bits. No other
// lane reads them.
template <class Nominal>
class Kept {
 public:
  using Pair = std::conditional_t<std::is_same_v<Nominal, Bfloat16>, __nv_bfloat162, __half2>;

  __device__ void keep(int r, const float (&x)[kColumns]) const {
    if constexpr (std::is_same_v<Nominal, Bfloat16>) {
      row(r)[0] = __floats2bfloat162_rn(x[0], x[1]), row(r)[1] = __floats2bfloat162_rn(x[2], x[3]);
    } else {
      row(r)[0] = __floats2half2_rn(x[0], x[1]), row(r)[1] = __floats2half2_rn(x[2], x[3]);
    }
  }
  __device__ FourElements read(int r, const float*) const {
    const Pair a = row(r)[0], b = row(r)[1];
    return {{__low2float(a), __high2float(a)}, {__low2float(b), __high2float(b)}};
  }

 private:
  __device__ static Pair* row(int r) {
    __shared__ alignas(8) Pair kept[kRows][kOnePassShape.threads()][2];
    return kept[r][threadIdx.x];
  }
};

// FP32 elements would not fit: they are read again from where they have just been written.
template <>
class Kept<Float32> {
 public:
  __device__ void keep(int, const float (&)[kColumns]) const {}
  __device__ FourElements read(int, const float* masters) const {
    return {{masters[0], masters[1]}, {masters[2], masters[3]}};
  }
};

// Updates the rows of a lane, keeps them, and returns the largest absolute value. `poison` as in
// `add_poison`.
template <class Nominal, class Grad, class Moment>
__device__ float update(const AdamArrays<Grad, Moment>& arrays, const OnePassLane& lane, const AdamScalars& scalars,
                        float clip, float& poison) {
  const Kept<Nominal> kept;
  const auto element = [&](int r) { return lane.element + r * lane.pitch; };
  float most = 0.0f;
  if (lane.pitch % kColumns == 0 && lane.whole(kRows) && arrays.aligned(lane.element)) {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      float masters[kColumns];
      arrays.finish(element(r), arrays.load(element(r)), scalars, clip, masters);
      most = fmaxf(most, row_amax<kColumns>(masters));
      add_poison<kColumns>(masters, poison);
      kept.keep(r, masters);
    }
    return most;
  }
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    const OnePassLane::Owned owned = lane.owned(r);
#pragma unroll 1
    for (int c = owned.first; c < owned.last; ++c) arrays.update_one(element(r) + c, scalars, clip);
    float masters[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) masters[c] = owned.has(c) ? *arrays.p(element(r) + c) : 0.0f;
    most = fmaxf(most, row_amax<kColumns>(masters));
    add_poison<kColumns>(masters, poison);
    kept.keep(r, masters);
  }
  return most;
}

// What the scale of a lane's block depends on: its amax, and the largest one of the 128 x 128
// elements.
struct LaneAmaxes {
  float block, group;
};

// The whole thread block calls it, with the largest absolute value of each lane.
template <Grid kGrid>
__device__ LaneAmaxes amaxes_of_lanes(float most) {
  constexpr int kAcross = 128 / side_of(kGrid), kTall = kWarps / kAcross;  // blocks side by side, warps to a block
  constexpr int kLanes = kWarpLanes / kAcross, kParts = kWarps * kAcross;
  __shared__ float parts[kParts];  // of a warp and a block each
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const float part = greatest<kLanes>(most);
  if (lane % kLanes == 0) parts[warp * kAcross + lane / kLanes] = part;
  __syncthreads();
  float group = 0.0f;
#pragma unroll
  for (int i = 0; i < kParts; i += kWarpLanes) group = fmaxf(group, parts[(i + lane) % kParts]);
  group = greatest<kWarpLanes>(group);
  if constexpr (kGrid == Grid::kSquare128) return {group, group};
  float block = 0.0f;
#pragma unroll
  for (int i = 0; i < kTall; ++i) block = fmaxf(block, parts[(warp / kTall * kTall + i) * kAcross + lane / kLanes]);
  return {block, group};
}

// The packed amax of a lane's block; one lane of each block stores it.
template <Grid kGrid>
__device__ void store_amax(const OnePassLane& lane, const Weight& w, const AmaxSink& out, float amax) {
  constexpr int kSide = side_of(kGrid), kTall = kWarps * kSide / 128, kLanes = kWarpLanes * kSide / 128;
  if (threadIdx.x / kWarpLanes % kTall != 0 || threadIdx.x % kLanes != 0) return;
  const int64_t across = (lane.columns + kSide - 1) / kSide;
  out.store(w[column::ROW_AMAX] + lane.row / kSide * across + lane.column / kSide, amax);
}

template <Grid kGrid>
__device__ float multiplier_of(const Format& format, float amax, float group) {
  if constexpr (kGrid == Grid::kSquare128) {
    return fp32_scale(amax, format.fp8_max(), format.amax_epsilon, format.power_of_2_scale);
  } else {
    const PowerOfTwoScale power = format.power_of_two_scale();
    return PowerOfTwoScale::multiplier(format.scale_group ? power.code(amax, group) : power.code(amax));
  }
}

// True if a lane's codes are stored a row at a time; `data` is the address of the weight's element 0.
template <class E>
__device__ bool stores_words(const OnePassLane& lane, uint64_t data) {
  constexpr int kInByte = 8 / E::kBits, kBytes = sizeof(typename Encoder<E>::Word4);
  return lane.whole(kRows) && (data + lane.element / kInByte) % kBytes == 0 && lane.pitch / kInByte % kBytes == 0;
}

template <class Nominal, class E>
__device__ void write_codes(const OnePassLane& lane, uint64_t master, uint64_t data, float multiplier) {
  using Word = typename Encoder<E>::Word4;
  constexpr int kInByte = 8 / E::kBits;
  const Kept<Nominal> kept;
  const auto codes_of = [&](const FourElements& x) {
    return Encoder<E>::encode4({x.a.x * multiplier, x.a.y * multiplier}, {x.b.x * multiplier, x.b.y * multiplier});
  };
  const auto masters = [&](int r) { return reinterpret_cast<const float*>(master) + lane.element + r * lane.pitch; };
  const auto at = [&](int r, int c) { return data + (lane.element + r * lane.pitch) / kInByte + c / kInByte; };
  if (stores_words<E>(lane, data)) {
#pragma unroll 4
    for (int r = 0; r < kRows; ++r) *reinterpret_cast<Word*>(at(r, 0)) = codes_of(kept.read(r, masters(r)));
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    const OnePassLane::Owned owned = lane.owned(r);  // whole bytes, as rows are owned whole
    if (owned.first >= owned.last) continue;
    FourElements x{};
    if constexpr (std::is_same_v<Nominal, Float32>) {
      const auto element = [&](int c) { return owned.has(c) ? masters(r)[c] : 0.0f; };
      x = {{element(0), element(1)}, {element(2), element(3)}};
    } else {
      x = kept.read(r, nullptr);
    }
    const Word codes = codes_of(x);
#pragma unroll
    for (int c = 0; c < kColumns; c += kInByte) {
      if (owned.has(c)) *reinterpret_cast<uint8_t*>(at(r, c)) = static_cast<uint8_t>(codes >> c * E::kBits);
    }
  }
}

__device__ inline uint64_t data_of(const BaseList& row_data, const Weight& w) {
  return row_data.addresses[w[column::ROW_DATA_BASE]] + w[column::ROW_DATA_OFFSET];
}

struct StateBases {
  BaseList master, grad, exp_avg, exp_avg_sq;
};

template <Grid kGrid>
__device__ OnePassLane lane_of(const Format& format, const Weight& w, const Item& item) {
  return find_lane<kColumns>(panel_grid(known<kGrid>(format), w, kOnePassShape), w, item.ordinal, kRows, kWarps);
}

template <class Grad, class Moment, class Nominal, class E, Grid kGrid>
__global__ void __launch_bounds__(kOnePassShape.threads(), kMinBlocks)
    adam_cast_kernel(Format format, const int64_t* table, const Item* items, StateBases state, const int64_t* groups,
                     AdamInputs adam, AmaxSink out, BaseList row_data) {
  if (holds(adam.skip)) return;
  float most;
  {
    const Item item = items[blockIdx.x];
    const Weight w = weight_of(table, item);
    const AdamArrays<Grad, Moment> arrays{origin_of<Float32>(state.master, w), origin_of<Grad>(state.grad, w),
                                          origin_of<Moment>(state.exp_avg, w), origin_of<Moment>(state.exp_avg_sq, w)};
    float poison = 0.0f;
    most = update<Nominal>(arrays, lane_of<kGrid>(format, w, item), adam.rows[groups[item.weight]], *adam.clip, poison);
    note_poison(w, out, poison);
  }
  const LaneAmaxes amaxes = amaxes_of_lanes<kGrid>(most);
  const float multiplier = multiplier_of<kGrid>(format, round_to<Nominal>(amaxes.block), round_to<Nominal>(amaxes.group));
  // Found once more, so that the loop above has these registers.
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const OnePassLane lane = lane_of<kGrid>(format, w, item);
  store_amax<kGrid>(lane, w, out, amaxes.block);
  write_codes<Nominal, E>(lane, origin_of<Float32>(state.master, w), data_of(row_data, w), multiplier);
}

template <class Body>
void for_nominal(Dtype nominal, const Body& body) {
  if (nominal == Dtype::kBfloat16) return body(Bfloat16{});
  if (nominal == Dtype::kFloat16) return body(Float16{});
  return body(Float32{});
}

// Calls body(element, kind of block grid).
template <class Body>
void for_codes(const Format& format, const Body& body) {
  for_grid(format, [&](auto grid) {
    if constexpr (decltype(grid)::value == Grid::kSquare128) {
      if (format.element == Element::kE4M3) return body(E4M3{}, grid);
      if (format.element == Element::kE5M2) return body(E5M2{}, grid);
    } else if constexpr (decltype(grid)::value == Grid::kSquare32) {
      if (format.element == Element::kE4M3) return body(E4M3{}, grid);
      if (format.element == Element::kE2M1) return body(E2M1{}, grid);
    }
    throw std::invalid_argument("the CUDA kernels do not encode this element in blocks of this shape in one pass");
  });
}

}  // namespace

void adam_cast(const Format& format, Dtype nominal, const AdamState& state, const Work& work, uintptr_t groups,
               const AdamStep& step, Array packed, DeviceBases row_data, Stream stream) {
  const StateBases bases{bases_of(state.master), bases_of(state.grad.address), bases_of(state.exp_avg.address),
                         bases_of(state.exp_avg_sq.address)};
  const auto go = [&](auto kernel) {
    launch(kernel, work.blocks, kOnePassShape.threads(), stream, format, table_of(work), items_of(work), bases,
           reinterpret_cast<const int64_t*>(groups), inputs_of(step), AmaxSink{amaxes_of(packed), nominal},
           bases_of(row_data));
  };
  for_states(state, [&](auto grad, auto moment) {
    for_nominal(nominal, [&](auto rounded) {
      for_codes(format, [&](auto element, auto grid) {
        using Grad = decltype(grad);
        using Moment = decltype(moment);
        using Nominal = decltype(rounded);
        using E = decltype(element);
        constexpr Grid kGrid = decltype(grid)::value;
        return go(adam_cast_kernel<Grad, Moment, Nominal, E, kGrid>);
      });
    });
  });
}

}  // namespace zerocast::cuda
