// The other operand of an FP8 product: `per_tensor`, `groups` and `groups_both_ways` of
// zerocast/gemm/inputs.py, byte for byte.
//
// A thread processes eight neighbouring elements together. Groups need one pass, also for both
// directions; per-tensor scaling needs one pass for the amax and one for the codes.
#include <algorithm>

#include "cuda/dispatch.cuh"
#include "cuda/groups.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kMostAmaxBlocks = 2048;   // each ends with atomics on one word
constexpr int kTimes = 4;               // loads of a thread in flight together
constexpr int kTokens = 2 * kElements;  // codes of one store of a turned row
constexpr int kBlockElements = kThreads * kElements * kTimes;

template <class In, class E>
__global__ void __launch_bounds__(kThreads) groups_kernel(const typename In::Word* x, int64_t rows, int64_t columns,
                                                          bool power_of_2, uint8_t* codes, float* scale_inv) {
  const Tile<In> tile(x, rows, columns, blockIdx.x);
  tile.template write_groups<E>(power_of_2, rows, columns, codes, scale_inv);
}

// The columns of a tile in shared memory, on their way to rows. The pieces of a column are exchanged
// by an exclusive or, so that a warp reaches all banks.
struct Turned {
  uint2 pieces[kInputGroup][kPieces];

  template <class In>
  __device__ void put(const Tile<In>& tile, int c, uint2 codes) {
    pieces[tile.lane * kElements + c][tile.strip ^ tile.lane] = codes;
  }

  template <class In>
  __device__ void store(const Tile<In>& tile, int64_t columns, int64_t tokens, uint8_t* to) const {
    for (int i = threadIdx.x; i < kInputGroup * kPieces / 2; i += kThreads) {
      const int c = i / (kPieces / 2), two = i % (kPieces / 2) * 2;
      const int64_t column = tile.first_column + c, token = tile.first_row + two * kElements;
      const uint2 first = pieces[c][two ^ (c / kElements)], second = pieces[c][(two + 1) ^ (c / kElements)];
      if (column < columns && token < tokens) {
        *reinterpret_cast<uint4*>(to + column * tokens + token) = {first.x, first.y, second.x, second.y};
      }
    }
  }
};

// Groups along rows and groups along columns; of a square, the codes of the columns have one scale
// for the whole tile.
template <class In, class E, bool kSquare>
__global__ void __launch_bounds__(kThreads, 3)
    groups_both_ways_kernel(const uint16_t* x, int64_t rows, int64_t columns, bool power_of_2, int64_t row_end,
                            uint8_t* codes, float* scale_inv, int64_t tokens, uint8_t* turned, float* turned_scale_inv) {
  constexpr int kWarps = kThreads / kWarpLanes;
  __shared__ __align__(16) Turned turning;
  __shared__ __align__(16) uint16_t amaxes[kWarps][kInputGroup];
  __shared__ __align__(16) float column_scales[kInputGroup];
  __shared__ int32_t warp_amaxes[kWarps];
  const Tile<In> tile(x, rows, columns, blockIdx.x);

  Eight<In> most = {};
#pragma unroll
  for (int r = 0; r < kElements; ++r) {
#pragma unroll
    for (int i = 0; i < Eight<In>::kWords; ++i) most.words[i] = greater<In>(most.words[i], tile.of_row[r].words[i]);
  }
#pragma unroll
  for (uint32_t& word : most.words) word = greater<In>(word, __shfl_xor_sync(0xFFFFFFFFu, word, kPieces));
  if (threadIdx.x % kWarpLanes < kPieces) {
    *reinterpret_cast<uint4*>(&amaxes[threadIdx.x / kWarpLanes][tile.lane * kElements]) =
        *reinterpret_cast<uint4*>(most.words);
  }
  const int32_t amax_bits = tile.template write_groups<E>(power_of_2, row_end, columns, codes, scale_inv);
  if constexpr (kSquare) {
    const int32_t of_warp = greatest_bits<kWarpLanes>(amax_bits);
    if (threadIdx.x % kWarpLanes == 0) warp_amaxes[threadIdx.x / kWarpLanes] = of_warp;
  }
  __syncthreads();

  if (threadIdx.x < kInputGroup) {
    int32_t greatest = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      greatest = larger(greatest, kSquare ? warp_amaxes[warp] : amaxes[warp][threadIdx.x]);
    }
    const float scale = scale_of<E>(kSquare ? greatest : f32_bits<In>(greatest), power_of_2);
    column_scales[threadIdx.x] = scale;
    const int64_t band = tile.first_row / kInputGroup;
    if constexpr (kSquare) {
      // the last tile fills the padding of its row of scales
      const int64_t bands = (rows - 1) / kInputGroup + 1, pitch = (bands + 3) / 4 * 4, entry = band + threadIdx.x;
      float* row_of_scales = turned_scale_inv + tile.first_column / kInputGroup * pitch;
      if (threadIdx.x == 0) row_of_scales[entry] = 1.0f / scale;
      if (threadIdx.x > 0 && band == bands - 1 && entry < pitch) row_of_scales[entry] = 0.0f;
    } else {
      turned_scale_inv[band * columns + tile.first_column + threadIdx.x] = 1.0f / scale;
    }
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kElements; ++c) {
    turning.put(tile, c, tile.template encode_column<E>(c, column_scales[tile.lane * kElements + c]));
  }
  __syncthreads();
  turning.store(tile, columns, tokens, turned);
}

// A tensor whose amax is known; the first thread block writes scale_inv.
template <class In, class E>
__global__ void __launch_bounds__(kThreads)
    tensor_both_ways_kernel(const uint16_t* x, int64_t rows, int64_t columns, const int32_t* amax_bits, uint8_t* codes,
                            float* scale_inv, int64_t tokens, uint8_t* turned) {
  __shared__ __align__(16) Turned turning;
  const float scale = scale_of<E>(*amax_bits & kMagnitude, false);
  const Tile<In> tile(x, rows, columns, blockIdx.x);
#pragma unroll
  for (int r = 0; r < kElements; ++r) {
    const uint2 eight = tile.of_row[r].template encode<E>(scale);
    if (tile.row + r < rows && tile.column < columns) {
      *reinterpret_cast<uint2*>(codes + (tile.row + r) * columns + tile.column) = eight;
    }
  }
#pragma unroll
  for (int c = 0; c < kElements; ++c) turning.put(tile, c, tile.template encode_column<E>(c, scale));
  __syncthreads();
  turning.store(tile, columns, tokens, turned);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
}

// The first threads process the remainder after the last eight elements, one each.
template <class In>
__global__ void __launch_bounds__(kThreads) amax_kernel(const typename In::Word* x, int64_t numel, int32_t* amax_bits) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads, eights = numel / kElements;
  uint32_t magnitudes = 0;
#pragma unroll kTimes
  for (int64_t i = thread; i < eights; i += threads) {
    magnitudes = greater<In>(magnitudes, Eight<In>::load(x + i * kElements).greatest());
  }
  int32_t most = f32_bits<In>(magnitudes);
  const int64_t left = eights * kElements + thread;
  if (left < numel) most = larger(most, bits_of(In::widen(x[left])) & kMagnitude);
  most = greatest_bits<kWarpLanes>(most);
  if (threadIdx.x % kWarpLanes == 0 && most > *static_cast<volatile int32_t*>(amax_bits)) atomicMax(amax_bits, most);
}

template <class In, class E>
__global__ void __launch_bounds__(kThreads)
    tensor_kernel(const typename In::Word* x, int64_t numel, const int32_t* amax_bits, uint8_t* codes, float* scale_inv) {
  const float scale = scale_of<E>(*amax_bits & kMagnitude, false);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kTimes) + threadIdx.x, eights = numel / kElements;
  Eight<In> eight[kTimes];
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    if (first + i * kThreads < eights) eight[i] = Eight<In>::load(x + (first + i * kThreads) * kElements);
  }
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    const int64_t at = first + i * kThreads;
    if (at < eights) *reinterpret_cast<uint2*>(codes + at * kElements) = eight[i].template encode<E>(scale);
  }
  if (blockIdx.x != 0) return;
  const int64_t left = eights * kElements + threadIdx.x;
  if (left < numel) codes[left] = static_cast<uint8_t>(encode<E>(In::widen(x[left]) * scale));
  if (threadIdx.x == 0) *scale_inv = 1.0f / scale;
}

template <class Body>
void for_fp8(Element element, const Body& body) {
  if (element == Element::kE4M3) return body(E4M3{});
  if (element == Element::kE5M2) return body(E5M2{});
  throw std::invalid_argument("inputs are quantized to e4m3 or e5m2");
}

template <class Body>
void for_sixteen_bits(Dtype dtype, const Body& body) {
  if (dtype == Dtype::kBfloat16) return body(Bfloat16{});
  if (dtype == Dtype::kFloat16) return body(Float16{});
  throw std::invalid_argument("inputs that are quantized in both directions have 16 bits");
}

int64_t blocks_for(int64_t work, int64_t each) { return (work + each - 1) / each; }

}  // namespace

void quantize_groups(Array x, int64_t rows, int64_t columns, Element element, bool power_of_2, uintptr_t codes,
                     uintptr_t scale_inv, Stream stream) {
  if (columns % kInputGroup) throw std::invalid_argument("rows of whole groups are quantized");
  const int64_t blocks = columns / kInputGroup * blocks_for(rows, kInputGroup);
  for_storage(x.dtype, [&](auto in) {
    for_fp8(element, [&](auto target) {
      using In = decltype(in);
      launch(groups_kernel<In, decltype(target)>, blocks, kThreads, stream,
             reinterpret_cast<const typename In::Word*>(x.address), rows, columns, power_of_2,
             reinterpret_cast<uint8_t*>(codes), reinterpret_cast<float*>(scale_inv));
    });
  });
}

namespace {

// Calls launch(type of x, type of codes, thread blocks).
template <class Launch>
void for_tiles(Array x, int64_t rows, int64_t columns, Element element, const BothWays& to, const Launch& launch_tiles) {
  if (columns % kTokens || to.tokens % kTokens) throw std::invalid_argument("features and tokens come in multiples of 16");
  const int64_t blocks = blocks_for(columns, kInputGroup) * blocks_for(rows, kInputGroup);
  for_sixteen_bits(x.dtype, [&](auto in) { for_fp8(element, [&](auto target) { launch_tiles(in, target, blocks); }); });
}

}  // namespace

void quantize_groups_both_ways(Array x, int64_t rows, int64_t columns, Element element, bool power_of_2, const BothWays& to,
                               Stream stream) {
  if (columns % kInputGroup) throw std::invalid_argument("rows of whole groups are quantized");
  for_tiles(x, rows, columns, element, to, [&](auto in, auto target, int64_t blocks) {
    using In = decltype(in);
    using E = decltype(target);
    launch(to.is_square ? groups_both_ways_kernel<In, E, true> : groups_both_ways_kernel<In, E, false>, blocks, kThreads,
           stream, reinterpret_cast<const uint16_t*>(x.address), rows, columns, power_of_2, to.rows,
           reinterpret_cast<uint8_t*>(to.codes), reinterpret_cast<float*>(to.scale_inv), to.tokens,
           reinterpret_cast<uint8_t*>(to.turned), reinterpret_cast<float*>(to.turned_scale_inv));
  });
}

void quantize_tensor_both_ways(Array x, int64_t rows, int64_t columns, Element element, const BothWays& to,
                               uintptr_t amax_bits, Stream stream) {
  for_tiles(x, rows, columns, element, to, [&](auto in, auto target, int64_t blocks) {
    launch(tensor_both_ways_kernel<decltype(in), decltype(target)>, blocks, kThreads, stream,
           reinterpret_cast<const uint16_t*>(x.address), rows, columns, reinterpret_cast<const int32_t*>(amax_bits),
           reinterpret_cast<uint8_t*>(to.codes), reinterpret_cast<float*>(to.scale_inv), to.tokens,
           reinterpret_cast<uint8_t*>(to.turned));
  });
}

void tensor_amax(Array x, int64_t numel, uintptr_t amax_bits, Stream stream) {
  auto* amax = reinterpret_cast<int32_t*>(amax_bits);
  {
    const DeviceGuard guard(stream.device);
    check(cudaMemsetAsync(amax, 0, sizeof *amax, reinterpret_cast<cudaStream_t>(stream.handle)));
  }
  const int64_t blocks = std::min<int64_t>(blocks_for(numel, kBlockElements), kMostAmaxBlocks);
  for_storage(x.dtype, [&](auto in) {
    using In = decltype(in);
    launch(amax_kernel<In>, blocks, kThreads, stream, reinterpret_cast<const typename In::Word*>(x.address), numel, amax);
  });
}

void quantize_tensor(Array x, int64_t numel, Element element, uintptr_t codes, uintptr_t scale_inv, uintptr_t amax_bits,
                     Stream stream) {
  for_storage(x.dtype, [&](auto in) {
    using In = decltype(in);
    for_fp8(element, [&](auto target) {
      launch(tensor_kernel<In, decltype(target)>, blocks_for(numel, kBlockElements), kThreads, stream,
             reinterpret_cast<const typename In::Word*>(x.address), numel, reinterpret_cast<const int32_t*>(amax_bits),
             reinterpret_cast<uint8_t*>(codes), reinterpret_cast<float*>(scale_inv));
    });
  });
}

}  // namespace zerocast::cuda
