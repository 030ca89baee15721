// The part after the update of a stage that updates masters and casts them in one pass.
//
// Some warps, of one thread block or of a cluster, take a tile of 128 x 128 elements, and a lane four
// columns of some rows of it. The updated elements of a lane stay in shared memory, rounded to the nominal
// dtype, until the amaxes of its blocks are known.
#pragma once

#include "cuda/amax.cuh"
#include "cuda/codes.cuh"
#include "cuda/dispatch.cuh"

namespace zerocast::cuda {

constexpr int kOnePassColumns = 4;

using OnePassLane = Lane<kOnePassColumns>;

template <Grid kGrid, int kWarps>
__device__ OnePassLane one_pass_lane(const Format& format, const Weight& w, const Item& item) {
  const PanelGrid grid = panel_grid(known<kGrid>(format), w, {kOnePassColumns, kWarps});
  return find_lane<kOnePassColumns>(grid, w, item.ordinal, one_pass_rows(kWarps), kWarps);
}

struct FourElements {
  float2 a, b;
};

// Four neighbouring elements of each row of a lane, rounded to the nominal dtype of 16 bits. No other
// lane reads them.
template <class Nominal, int kWarps>
class Kept {
 public:
  __device__ Kept() {
    __shared__ uint2 kept[one_pass_rows(kWarps)][kWarpLanes * kWarps];
    first_ = static_cast<uint32_t>(__cvta_generic_to_shared(&kept[0][threadIdx.x]));
    // Kept in a register: the compiler would find it again for each row.
    asm volatile("" : "+r"(first_));
  }

  __device__ void keep(int r, const float (&x)[kOnePassColumns]) const {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(row(r)), "r"(pair(x[0], x[1])), "r"(pair(x[2], x[3])) : "memory");
  }
  __device__ FourElements read(int r, const float*) const {
    uint32_t a, b;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(row(r)) : "memory");
    return {widen(a), widen(b)};
  }

 private:
  __device__ uint32_t row(int r) const { return first_ + r * static_cast<int>(sizeof(uint2) * kWarpLanes * kWarps); }

  __device__ static uint32_t pair(float a, float b) {
    if constexpr (std::is_same_v<Nominal, Bfloat16>) {
      return bits_of_pair(__floats2bfloat162_rn(a, b));
    } else {
      return bits_of_pair(__floats2half2_rn(a, b));
    }
  }
  template <class Pair>
  __device__ static uint32_t bits_of_pair(const Pair& pair) {
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
  }
  __device__ static float2 widen(uint32_t pair) {
    if constexpr (std::is_same_v<Nominal, Bfloat16>) {
      return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
    } else {
      __half2 halves;
      memcpy(&halves, &pair, sizeof halves);
      return __half22float2(halves);
    }
  }

  uint32_t first_;
};

// FP32 elements would not fit: they are read again from where they have just been written.
template <int kWarps>
class Kept<Float32, kWarps> {
 public:
  __device__ void keep(int, const float (&)[kOnePassColumns]) const {}
  __device__ FourElements read(int, const float* masters) const {
    return {{masters[0], masters[1]}, {masters[2], masters[3]}};
  }
};

// The inputs of the scale of a lane's block: its amax, and the largest amax of the 128 x 128
// elements.
struct LaneAmaxes {
  float block, group;
};

// The whole thread block calls it, with the largest absolute value of each lane. Its warps are side by side
// over kTiles tiles, then below each other, kTall to a tile, with kRows rows each. `group` is of its rows.
template <Grid kGrid, int kRows, int kTall, int kTiles = 1>
__device__ LaneAmaxes amaxes_of_lanes(float most) {
  constexpr int kAcross = 128 / side_of(kGrid), kLanes = kWarpLanes / kAcross;  // blocks side by side, lanes to a block
  constexpr int kOfBlock = side_of(kGrid) / kRows, kParts = kTall * kAcross;    // warps to a block
  __shared__ float of_tiles[kTiles][kParts];                                    // a value for each warp and block
  const int warp = threadIdx.x / kWarpLanes / kTiles, lane = threadIdx.x % kWarpLanes;
  float (&parts)[kParts] = of_tiles[threadIdx.x / kWarpLanes % kTiles];
  const float part = kLanes == kWarpLanes ? largest_of_warp(most) : greatest<kLanes>(most);
  if (lane % kLanes == 0) parts[warp * kAcross + lane / kLanes] = part;
  __syncthreads();
  float group = 0.0f;
#pragma unroll
  for (int i = 0; i < kParts; i += kWarpLanes) group = fmaxf(group, parts[(i + lane) % kParts]);
  group = largest_of_warp(group);
  if constexpr (kGrid == Grid::kSquare128) return {group, group};
  float block = 0.0f;
#pragma unroll
  for (int i = 0; i < kOfBlock; ++i) {
    block = fmaxf(block, parts[(warp / kOfBlock * kOfBlock + i) * kAcross + lane / kLanes]);
  }
  return {block, group};
}

// The packed amax of a lane's block; one lane of each block stores it. `warp` counts from the top of a tile.
template <Grid kGrid, int kRows>
__device__ void store_amax(const OnePassLane& lane, int warp, const Weight& w, const AmaxSink& out, float amax) {
  constexpr int kSide = side_of(kGrid), kOfBlock = kSide / kRows, kLanes = kWarpLanes * kSide / 128;
  if (warp % kOfBlock != 0 || threadIdx.x % kLanes != 0) return;
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
template <class E, int kWarps>
__device__ bool stores_words(const OnePassLane& lane, uint64_t data) {
  constexpr int kInByte = 8 / E::kBits, kBytes = sizeof(typename Encoder<E>::Word4);
  return lane.whole(one_pass_rows(kWarps)) && (data + lane.element / kInByte) % kBytes == 0 &&
         lane.pitch / kInByte % kBytes == 0;
}

template <class Nominal, class E, int kWarps>
__device__ void write_codes(const OnePassLane& lane, uint64_t master, uint64_t data, float multiplier) {
  using Word = typename Encoder<E>::Word4;
  constexpr int kInByte = 8 / E::kBits, kRows = one_pass_rows(kWarps);
  const Kept<Nominal, kWarps> kept;
  const auto codes_of = [&](const FourElements& x) {
    return Encoder<E>::encode4({x.a.x * multiplier, x.a.y * multiplier}, {x.b.x * multiplier, x.b.y * multiplier});
  };
  const auto masters = [&](int r) { return reinterpret_cast<const float*>(master) + lane.element + r * lane.pitch; };
  const auto at = [&](int r, int c) { return data + (lane.element + r * lane.pitch) / kInByte + c / kInByte; };
  if (stores_words<E, kWarps>(lane, data)) {
    const int64_t row_bytes = lane.pitch / kInByte;
    uint64_t to = at(0, 0);
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int r = 0; r < kRows; r += kAtOnce) {
      // All are read before one is stored: the compiler cannot know that these are different places.
      FourElements rows[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) rows[i] = kept.read(r + i, masters(r + i));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, to += row_bytes) *reinterpret_cast<Word*>(to) = codes_of(rows[i]);
    }
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
    for (int c = 0; c < kOnePassColumns; c += kInByte) {
      if (owned.has(c)) *reinterpret_cast<uint8_t*>(at(r, c)) = static_cast<uint8_t>(codes >> c * E::kBits);
    }
  }
}

__device__ inline uint64_t data_of(const BaseList& row_data, const Weight& w) {
  return row_data.addresses[w[column::ROW_DATA_BASE]] + w[column::ROW_DATA_OFFSET];
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

}  // namespace zerocast::cuda
