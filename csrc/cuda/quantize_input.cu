// The other operand of an FP8 product: `per_tensor` and `groups` of zerocast/gemm/inputs.py, byte
// for byte.
//
// A thread takes eight neighbouring elements at once. Groups take one pass; a whole tensor takes
// one for its amax and one for its codes.
#include <algorithm>

#include "cuda/codes.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kElements = 8, kThreads = 256;
constexpr int kGroupLanes = kInputGroup / kElements;
constexpr int kGroupRows = kThreads / kGroupLanes;  // of a thread block, at a time
constexpr int kMostAmaxBlocks = 2048;               // each ends with atomics on one word
constexpr int kTimes = 4;                           // loads of a thread in flight together

template <class In>
struct Eight {
  float x[kElements];

  __device__ static Eight load(const typename In::Word* at) {
    Eight eight;
#pragma unroll
    for (int i = 0; i < kElements; i += 4) {
      const Four<In> four = Four<In>::load(at + i);
#pragma unroll
      for (int c = 0; c < 4; ++c) eight.x[i + c] = four[c];
    }
    return eight;
  }

  // Bits of the greatest magnitude: they order as the values do, with NaN above Inf.
  __device__ int32_t amax_bits() const {
    int32_t most = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) most = larger(most, bits_of(x[i]) & kMagnitude);
    return most;
  }

  template <class E>
  __device__ void encode(float scale, uint8_t* at) const {
    float2 y[kElements / 2];
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) y[i] = {x[2 * i] * scale, x[2 * i + 1] * scale};
    *reinterpret_cast<uint2*>(at) = Encoder<E>::encode8(y);
  }
};

// `encode_scale` of inputs.py: NaN if the amax is not finite.
template <class E>
__device__ float scale_of(int32_t amax_bits, bool power_of_2) {
  if (amax_bits >= kInfinity) return float_of(kNaN);
  if (amax_bits == 0) return 1.0f;
  const int32_t scale = smaller(bits_of(decode<E>(E::kLargestCode) / float_of(amax_bits)), bits_of(kFloatMax));
  return float_of(power_of_2 ? scale & kInfinity : scale);
}

template <int lanes>
__device__ int32_t greatest_bits(int32_t value) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) value = larger(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

// Rows first, so that a thread block writes neighbouring scales, which are column-major.
template <class In, class E>
__global__ void __launch_bounds__(kThreads) groups_kernel(const typename In::Word* x, int64_t rows, int64_t columns,
                                                          bool power_of_2, uint8_t* codes, float* scale_inv) {
  const int64_t down = (rows - 1) / (kGroupRows * kTimes) + 1, group = blockIdx.x / down;
  const int64_t first = blockIdx.x % down * (kGroupRows * kTimes) + threadIdx.x / kGroupLanes;
  const int64_t column = group * kInputGroup + threadIdx.x % kGroupLanes * kElements;
  Eight<In> eight[kTimes] = {};
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    const int64_t row = first + i * kGroupRows;
    if (row < rows) eight[i] = Eight<In>::load(x + row * columns + column);
  }
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    const int64_t row = first + i * kGroupRows;
    const float scale = scale_of<E>(greatest_bits<kGroupLanes>(eight[i].amax_bits()), power_of_2);
    if (row >= rows) continue;
    eight[i].template encode<E>(scale, codes + row * columns + column);
    if (threadIdx.x % kGroupLanes == 0) scale_inv[group * rows + row] = 1.0f / scale;
  }
}

// The first threads process the remainder after the last eight elements, one each.
template <class In>
__global__ void __launch_bounds__(kThreads) amax_kernel(const typename In::Word* x, int64_t numel, int32_t* amax_bits) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads, eights = numel / kElements;
  int32_t most = 0;
#pragma unroll kTimes
  for (int64_t i = thread; i < eights; i += threads) most = larger(most, Eight<In>::load(x + i * kElements).amax_bits());
  const int64_t left = eights * kElements + thread;
  if (left < numel) most = larger(most, bits_of(In::widen(x[left])) & kMagnitude);
  most = greatest_bits<kWarpLanes>(most);
  if (threadIdx.x % kWarpLanes == 0 && most > *static_cast<volatile int32_t*>(amax_bits)) atomicMax(amax_bits, most);
}

template <class In, class E>
__global__ void __launch_bounds__(kThreads)
    tensor_kernel(const typename In::Word* x, int64_t numel, const int32_t* amax_bits, uint8_t* codes, float* scale_inv) {
  const float scale = scale_of<E>(*amax_bits, false);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kTimes) + threadIdx.x, eights = numel / kElements;
  Eight<In> eight[kTimes];
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    if (first + i * kThreads < eights) eight[i] = Eight<In>::load(x + (first + i * kThreads) * kElements);
  }
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    const int64_t at = first + i * kThreads;
    if (at < eights) eight[i].template encode<E>(scale, codes + at * kElements);
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

int64_t blocks_for(int64_t work, int64_t each) { return (work + each - 1) / each; }

}  // namespace

void quantize_groups(Array x, int64_t rows, int64_t columns, Element element, bool power_of_2, uintptr_t codes,
                     uintptr_t scale_inv, Stream stream) {
  if (columns % kInputGroup) throw std::invalid_argument("rows of whole groups are quantized");
  const int64_t blocks = columns / kInputGroup * blocks_for(rows, kGroupRows * kTimes);
  for_storage(x.dtype, [&](auto in) {
    for_fp8(element, [&](auto target) {
      using In = decltype(in);
      launch(groups_kernel<In, decltype(target)>, blocks, kThreads, stream,
             reinterpret_cast<const typename In::Word*>(x.address), rows, columns, power_of_2,
             reinterpret_cast<uint8_t*>(codes), reinterpret_cast<float*>(scale_inv));
    });
  });
}

void quantize_tensor(Array x, int64_t numel, Element element, uintptr_t codes, uintptr_t scale_inv, uintptr_t amax_bits,
                     Stream stream) {
  auto* amax = reinterpret_cast<int32_t*>(amax_bits);
  {
    const DeviceGuard guard(stream.device);
    check(cudaMemsetAsync(amax, 0, sizeof *amax, reinterpret_cast<cudaStream_t>(stream.handle)));
  }
  const int64_t each = kThreads * kElements * kTimes, blocks = std::max<int64_t>(1, blocks_for(numel, each));
  for_storage(x.dtype, [&](auto in) {
    using In = decltype(in);
    const auto* from = reinterpret_cast<const typename In::Word*>(x.address);
    launch(amax_kernel<In>, std::min<int64_t>(blocks, kMostAmaxBlocks), kThreads, stream, from, numel, amax);
    for_fp8(element, [&](auto target) {
      launch(tensor_kernel<In, decltype(target)>, blocks, kThreads, stream, from, numel, amax,
             reinterpret_cast<uint8_t*>(codes), reinterpret_cast<float*>(scale_inv));
    });
  });
}

}  // namespace zerocast::cuda
