// Stages quantize_gradient and add_gradients: a gradient that is sent between ranks, in groups of FP8 codes
// or as it is.
//
// Parts of complete groups are read by the tiles of groups.cuh, one group per row. Parts of other
// lengths, which only unusual shapes under FSDP2 have, are read element by element.
#include <stdexcept>

#include "cuda/dispatch.cuh"
#include "cuda/groups.cuh"
#include "cuda/stages.h"
#include "gradient_message.h"

namespace zerocast::cuda {
namespace {

static_assert(kGradientGroup == kInputGroup, "a row of a tile is a group");
constexpr int kTileElements = kGradientGroup * kGradientGroup;
constexpr int kWarps = kThreads / kWarpLanes, kOfLane = kGradientGroup / kWarpLanes;
constexpr int kSenders = 8;  // senders whose codes are loaded together
// Of gradients that are not messages: neighbouring elements of a load, and loads of a thread in flight together.
constexpr int kFour = 4, kTimes = 8;

int64_t blocks_for(int64_t work, int64_t each) { return (work + each - 1) / each; }

__device__ void write_padding(const GradientMessage& part, uint8_t* message) {
  const int64_t gap = part.numel + threadIdx.x, end = part.scales_end() + threadIdx.x;
  if (gap < part.scales_at()) message[gap] = 0;
  if (end < part.bytes()) message[end] = 0;
}

template <class In>
__global__ void __launch_bounds__(kThreads)
    quantize_tiles_kernel(const typename In::Word* grad, GradientMessage part, uint32_t tiles, uint8_t* messages) {
  const uint32_t index = blockIdx.x / tiles, ordinal = blockIdx.x - index * tiles;
  uint8_t* message = messages + index * part.bytes();
  const Tile<In> tile(grad + index * part.numel, part.groups(), kGradientGroup, ordinal);
  auto* scale_inv = reinterpret_cast<float*>(message + part.scales_at());
  tile.template write_groups<E4M3>(false, part.groups(), kGradientGroup, message, scale_inv);
  if (ordinal == 0) write_padding(part, message);
}

// A warp takes a group.
template <class In>
__global__ void __launch_bounds__(kThreads)
    quantize_elements_kernel(const typename In::Word* grad, GradientMessage part, uint32_t blocks, uint8_t* messages) {
  const uint32_t index = blockIdx.x / blocks, ordinal = blockIdx.x - index * blocks;
  uint8_t* message = messages + index * part.bytes();
  if (ordinal == 0) write_padding(part, message);
  const int64_t group = static_cast<int64_t>(ordinal) * kWarps + threadIdx.x / kWarpLanes;
  if (group >= part.groups()) return;
  const int64_t first = group * kGradientGroup + threadIdx.x % kWarpLanes;
  float x[kOfLane];
  int32_t amax_bits = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int64_t at = first + i * kWarpLanes;
    x[i] = at < part.numel ? In::widen(grad[index * part.numel + at]) : 0.0f;
    amax_bits = larger(amax_bits, bits_of(x[i]) & kMagnitude);
  }
  const float scale = scale_of<E4M3>(greatest_bits<kWarpLanes>(amax_bits), false);
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int64_t at = first + i * kWarpLanes;
    if (at < part.numel) message[at] = static_cast<uint8_t>(encode<E4M3>(x[i] * scale));
  }
  if (threadIdx.x % kWarpLanes == 0) reinterpret_cast<float*>(message + part.scales_at())[group] = inverse_of(scale);
}

__device__ float landed(float before, float total, float divisor, bool adds) {
  // A NaN keeps its bits if there is nothing to divide.
  const float mean = divisor == 1.0f ? total : total / divisor;
  return adds ? before + mean : mean;
}

__device__ float4 exchanged(float4 value) {
  return {__shfl_xor_sync(0xFFFFFFFFu, value.x, 1), __shfl_xor_sync(0xFFFFFFFFu, value.y, 1),
          __shfl_xor_sync(0xFFFFFFFFu, value.z, 1), __shfl_xor_sync(0xFFFFFFFFu, value.w, 1)};
}

// A thread takes eight neighbouring elements of every message. Two threads exchange halves before
// they store their sums, so that a store fills whole sectors of 32 bytes.
__global__ void __launch_bounds__(kThreads, 5)
    add_eights_kernel(const uint8_t* messages, int32_t parts, GradientMessage part, float divisor, bool adds, float* out) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kElements;
  const bool exists = at < part.numel;
  const uint8_t* code_at = messages + at;
  const uint8_t* scale_at = messages + part.scales_at() + at / kGradientGroup * 4;
  float2 total[kElements / 2] = {};
  for (int32_t first = 0; first < parts; first += kSenders) {
    uint2 codes[kSenders];
    float scale_inv[kSenders];
#pragma unroll
    for (int i = 0; i < kSenders; ++i) {
      if (exists && first + i < parts) {
        codes[i] = *reinterpret_cast<const uint2*>(code_at + (first + i) * part.bytes());
        scale_inv[i] = *reinterpret_cast<const float*>(scale_at + (first + i) * part.bytes());
      }
    }
#pragma unroll
    for (int i = 0; i < kSenders; ++i) {
      if (first + i >= parts) continue;
      float2 y[kElements / 2];
      Decoder<E4M3>::decode8(codes[i], y);
#pragma unroll
      for (int pair = 0; pair < kElements / 2; ++pair) {
        const float2 value = {y[pair].x * scale_inv[i], y[pair].y * scale_inv[i]};
        const bool is_first = i == 0 && first == 0;
        total[pair] = is_first ? value : float2{total[pair].x + value.x, total[pair].y + value.y};
      }
    }
  }
  const bool odd = threadIdx.x % 2;
  const float4 low = {total[0].x, total[0].y, total[1].x, total[1].y};
  const float4 high = {total[2].x, total[2].y, total[3].x, total[3].y};
  const float4 theirs = exchanged(odd ? low : high);
  // of the sixteen elements of both threads: the first and second four, then the third and fourth
  const float4 sums[] = {odd ? theirs : low, odd ? high : theirs};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t place = at - (odd ? kElements : 0) + 8 * i + (odd ? 4 : 0);
    if (place >= part.numel) continue;
    auto* target = reinterpret_cast<float4*>(out + place);
    const float4 before = adds ? *target : float4{};
    *target = {landed(before.x, sums[i].x, divisor, adds), landed(before.y, sums[i].y, divisor, adds),
               landed(before.z, sums[i].z, divisor, adds), landed(before.w, sums[i].w, divisor, adds)};
  }
}

__global__ void __launch_bounds__(kThreads)
    add_elements_kernel(const uint8_t* messages, int32_t parts, GradientMessage part, float divisor, bool adds, float* out) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= part.numel) return;
  float total = 0.0f;
  for (int32_t i = 0; i < parts; ++i) {
    const uint8_t* message = messages + i * part.bytes();
    const float scale_inv = reinterpret_cast<const float*>(message + part.scales_at())[at / kGradientGroup];
    const float value = decode<E4M3>(message[at]) * scale_inv;
    total = i == 0 ? value : total + value;
  }
  out[at] = landed(adds ? out[at] : 0.0f, total, divisor, adds);
}

template <class Word>
struct alignas(kFour * sizeof(Word)) Neighbours {
  Word words[kFour];
};

// Gradients that are not messages. All parts and `out` are aligned to four elements.
template <class In>
__global__ void __launch_bounds__(kThreads) add_plain_fours_kernel(const typename In::Word* gradients, int32_t parts,
                                                                   int64_t numel, float divisor, bool adds, float* out) {
  using From = Neighbours<typename In::Word>;
  constexpr int64_t kStride = kThreads * kFour;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kStride * kTimes + threadIdx.x * kFour;
  float total[kTimes][kFour];
  for (int32_t sender = 0; sender < parts; ++sender) {
    From loaded[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const int64_t at = first + i * kStride;
      if (at < numel) loaded[i] = *reinterpret_cast<const From*>(gradients + sender * numel + at);
    }
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        const float value = In::widen(loaded[i].words[j]);
        total[i][j] = sender == 0 ? value : total[i][j] + value;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    const int64_t at = first + i * kStride;
    if (at >= numel) continue;
    auto* target = reinterpret_cast<float4*>(out + at);
    const float4 before = adds ? *target : float4{};
    *target = {landed(before.x, total[i][0], divisor, adds), landed(before.y, total[i][1], divisor, adds),
               landed(before.z, total[i][2], divisor, adds), landed(before.w, total[i][3], divisor, adds)};
  }
}

template <class In>
__global__ void __launch_bounds__(kThreads) add_plain_elements_kernel(const typename In::Word* gradients, int32_t parts,
                                                                      int64_t numel, float divisor, bool adds, float* out) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= numel) return;
  float total = In::widen(gradients[at]);
  for (int32_t sender = 1; sender < parts; ++sender) total = total + In::widen(gradients[sender * numel + at]);
  out[at] = landed(adds ? out[at] : 0.0f, total, divisor, adds);
}

}  // namespace

void quantize_gradient(Array grad, int64_t numel, int64_t parts, uintptr_t messages, Stream stream) {
  const GradientMessage part{numel / parts};
  const bool whole = part.numel % kGradientGroup == 0 && grad.address % sizeof(uint4) == 0;
  const int64_t blocks = whole ? blocks_for(part.numel, kTileElements) : blocks_for(part.groups(), kWarps);
  for_storage(grad.dtype, [&](auto in) {
    using In = decltype(in);
    launch(whole ? quantize_tiles_kernel<In> : quantize_elements_kernel<In>, parts * blocks, kThreads, stream,
           reinterpret_cast<const typename In::Word*>(grad.address), part, static_cast<uint32_t>(blocks),
           reinterpret_cast<uint8_t*>(messages));
  });
}

void add_gradients(uintptr_t messages, int64_t parts, int64_t divisor, bool adds, Array out, int64_t numel, Stream stream) {
  if (out.dtype != Dtype::kFloat32) throw std::invalid_argument("gradients are added in float32");
  const GradientMessage part{numel};
  const bool whole = numel % kElements == 0 && out.address % sizeof(float4) == 0;
  launch(whole ? add_eights_kernel : add_elements_kernel, blocks_for(numel, whole ? kThreads * kElements : kThreads),
         kThreads, stream, reinterpret_cast<const uint8_t*>(messages), static_cast<int32_t>(parts), part,
         static_cast<float>(divisor), adds, reinterpret_cast<float*>(out.address));
}

void add_plain_gradients(Array gradients, int64_t parts, int64_t divisor, bool adds, Array out, int64_t numel,
                         Stream stream) {
  if (out.dtype != Dtype::kFloat32) throw std::invalid_argument("gradients are added in float32");
  for_storage(gradients.dtype, [&](auto in) {
    using In = decltype(in);
    const bool whole = numel % kFour == 0 && gradients.address % sizeof(Neighbours<typename In::Word>) == 0 &&
                       out.address % sizeof(float4) == 0;
    launch(whole ? add_plain_fours_kernel<In> : add_plain_elements_kernel<In>,
           blocks_for(numel, whole ? kThreads * kFour * kTimes : kThreads), kThreads, stream,
           reinterpret_cast<const typename In::Word*>(gradients.address), static_cast<int32_t>(parts), numel,
           static_cast<float>(divisor), adds, reinterpret_cast<float*>(out.address));
  });
}

}  // namespace zerocast::cuda
