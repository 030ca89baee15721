// Stage choose_scales: the scale of every block whose elements are all owned, by the error that each
// of its two scales leaves. A block that chooses the code 4 for its amax gets the minus there.
//
// A thread takes a row of a block of 16 x 16, which is summed in the order of its elements; half a
// warp takes the block and adds its rows 8, 4, 2 and 1 apart. Side by side, the halves of a warp read
// whole lines of 32 elements. A thread block has the work of a cast: 64 rows of 256 columns.
//
// An error is that of a magnitude, since rounding has no sign, and there are eight magnitudes under a
// scale. Lane 8 * map + code of a half warp holds what the code decodes to, map 0 being that of the
// code 4, and all lanes look it up there: two divisions a block and lane, none an element.
#include "cuda/codes.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"
#include "cuda/tensor_amax.cuh"

namespace zerocast::cuda {
namespace {

constexpr int kBlock = 16, kCodes = 8;  // codes of one sign

struct ChoiceInputs {
  Format format;
  BaseList masters;
  Amaxes packed;
  const float* partial;
};

template <class Storage, class Nominal>
__device__ void load_row(const typename Storage::Word* at, float (&x)[kBlock]) {
  const auto nominal = [](typename Storage::Word word) { return round_to<Nominal>(Storage::widen(word)); };
  if (reinterpret_cast<uint64_t>(at) % Four<Storage>::kBytes == 0) {
    Four<Storage> fours[kBlock / 4];
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) fours[i] = Four<Storage>::load(at + 4 * i);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = nominal(fours[i / 4].words[i % 4]);
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = nominal(at[i]);
  }
}

template <bool kSquares>
__device__ float error_of_row(const float (&x)[kBlock], int map, float multiplier, float decoded) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t code = encode_e2m1_magnitude(x[i] * multiplier);
    const float value = __shfl_sync(0xFFFFFFFFu, decoded, code + kCodes * map, kBlock);
    const float difference = value - fabsf(x[i]);
    const float error = kSquares ? difference * difference : fabsf(difference);
    sum = i == 0 ? error : sum + error;
  }
  return sum;
}

__device__ float sum_of_rows(float sum) {
#pragma unroll
  for (int apart = kBlock / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
  return sum;
}

template <class Storage, class Nominal, bool kSquares>
__global__ void __launch_bounds__(kCastShape.threads())
    choose_kernel(ChoiceInputs in, const int64_t* table, const Item* items) {
  constexpr int kAcross = kCastShape.width() / kBlock, kDown = kCastShape.warps * kPanelRows / kBlock;
  constexpr int kAtOnce = kCastShape.threads() / kBlock;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const PanelGrid grid = panel_grid(known<Grid::kSquare16>(in.format), w, kCastShape);
  const uint32_t group = item.ordinal / grid.across, beside = item.ordinal - group * grid.across;
  const float tensor_amax = tensor_amax_of(in.partial, item.weight), top = in.format.top();
  const FourOverSixScale scale(tensor_amax, top);
  const int lane = threadIdx.x % kBlock;
  const uint64_t origin = origin_of<Storage>(in.masters, w);
  const int64_t across = w.columns() / kBlock;
#pragma unroll 1
  for (int i = threadIdx.x / kBlock; i < kAcross * kDown; i += kAtOnce) {
    const int64_t row = static_cast<int64_t>(group) * kDown + i / kAcross;
    const int64_t column = static_cast<int64_t>(beside) * kAcross + i % kAcross;
    const int64_t first = row * kBlock * w.columns() + column * kBlock;
    const bool whole = column < across && first >= w.start() && first + (kBlock - 1) * w.columns() + kBlock <= w.stop();
    const int64_t index = w[column::ROW_AMAX] + row * across + column;
    const float amax = whole ? fabsf(in.packed.load(index)) : 0.0f;
    float x[kBlock] = {};
    if (whole) {
      const int64_t element = first + lane * w.columns();
      load_row<Storage, Nominal>(reinterpret_cast<const typename Storage::Word*>(
                                     origin + element * static_cast<int64_t>(sizeof(typename Storage::Word))),
                                 x);
    }
    const MapError map(scale, lane < kCodes ? -amax : amax, tensor_amax, top, kSquares);
    const float decoded = map.decoded(lane % kCodes);
    float sums[2];
#pragma unroll
    for (int other = 0; other < 2; ++other) {
      const float multiplier = __shfl_sync(0xFFFFFFFFu, map.multiplier, kCodes * other, kBlock);
      sums[other] = sum_of_rows(error_of_row<kSquares>(x, other, multiplier, decoded));
    }
    if (whole && lane == 0) in.packed.store(index, sums[0] < sums[1] ? -amax : amax);
  }
}

}  // namespace

void choose_scales(const Format& format, Dtype nominal, Dtype master, DeviceBases masters, const Work& work, Array packed,
                   uintptr_t partial, Stream stream) {
  if (!is(format.block, kBlock, kBlock)) throw std::invalid_argument("scales are chosen for blocks of 16 x 16");
  launch_partial_maxima(format, packed, work, partial, stream);
  const ChoiceInputs in{format, bases_of(masters), amaxes_of(packed), reinterpret_cast<const float*>(partial)};
  for_masters(master, nominal, [&](auto storage, auto rounded) {
    using Storage = decltype(storage);
    using Nominal = decltype(rounded);
    const auto kernel = format.four_over_six == FourOverSix::kMse ? choose_kernel<Storage, Nominal, true>
                                                                  : choose_kernel<Storage, Nominal, false>;
    launch(kernel, work.blocks, kCastShape.threads(), stream, in, table_of(work), items_of(work));
  });
}

}  // namespace zerocast::cuda
