// Gradients that are reduced together, laid out by rank in the dtype of the reduction, as FSDP2's
// `fsdp::chunk_cat` does (zerocast/fsdp2/reduction.py). This is not a stage.
//
// A rank's row has its concatenated parts of the gradients. A launch takes up to kMostGradients as
// arguments, so nothing is copied to the device for it.
#include <stdexcept>

#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kFour = 4;   // neighbouring elements of one load
constexpr int kTimes = 8;  // loads of a thread in flight together
constexpr int64_t kBlockElements = kThreads * kFour * kTimes;
constexpr int kMostGradients = 64;

template <class Word>
struct alignas(kFour * sizeof(Word)) Four {
  Word words[kFour];
};

struct Gradient {
  uint64_t address;
  int64_t numel;        // elements of a rank's part
  int64_t place;        // offset of that part in a rank's row
  int64_t first_block;  // first block among the blocks for a rank
};

struct Gradients {
  Gradient gradients[kMostGradients];
  int32_t count;
  int64_t blocks;  // blocks for a rank
  int64_t row;     // elements for a rank
};

template <class In, class Out>
__device__ typename Out::Word written(typename In::Word word) {
  if constexpr (std::is_same_v<In, Out>) return word;
  return Out::narrow(In::widen(word));
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) lay_out_kernel(const __grid_constant__ Gradients all, typename Out::Word* rows) {
  using From = Four<typename In::Word>;
  using To = Four<typename Out::Word>;
  const int64_t rank = blockIdx.x / all.blocks, block = blockIdx.x - rank * all.blocks;
  int index = 0;
  while (index + 1 < all.count && block >= all.gradients[index + 1].first_block) ++index;
  const Gradient& gradient = all.gradients[index];
  const auto* from = reinterpret_cast<const typename In::Word*>(gradient.address) + rank * gradient.numel;
  auto* to = rows + rank * all.row + gradient.place;
  const int64_t begin = (block - gradient.first_block) * kBlockElements;
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(from) % sizeof(From) == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(To) == 0;
  if (is_aligned && begin + kBlockElements <= gradient.numel) {
    const int64_t first = begin + threadIdx.x * kFour;
    From loaded[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      loaded[i] = *reinterpret_cast<const From*>(from + first + i * kThreads * kFour);
    }
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      To four;
#pragma unroll
      for (int j = 0; j < kFour; ++j) four.words[j] = written<In, Out>(loaded[i].words[j]);
      *reinterpret_cast<To*>(to + first + i * kThreads * kFour) = four;
    }
    return;
  }
  const int64_t end = begin + kBlockElements < gradient.numel ? begin + kBlockElements : gradient.numel;
  for (int64_t at = begin + threadIdx.x; at < end; at += kThreads) to[at] = written<In, Out>(from[at]);
}

}  // namespace

void lay_out(const std::vector<uintptr_t>& gradients, const std::vector<int64_t>& numels, Dtype dtype, int64_t ranks,
             Array out, Stream stream) {
  if (out.dtype != dtype && out.dtype != Dtype::kFloat32) {
    throw std::invalid_argument("gradients are laid out in their own dtype or in float32");
  }
  int64_t row = 0;
  for (const int64_t numel : numels) row += numel / ranks;
  int64_t place = 0;
  for (size_t first = 0; first < gradients.size(); first += kMostGradients) {
    Gradients all{};
    all.row = row;
    for (size_t i = first; i < gradients.size() && i < first + kMostGradients; ++i) {
      const int64_t numel = numels[i] / ranks;
      all.gradients[all.count++] = {gradients[i], numel, place, all.blocks};
      all.blocks += (numel + kBlockElements - 1) / kBlockElements;
      place += numel;
    }
    for_grad(dtype, [&](auto in) {
      using In = decltype(in);
      const auto run = [&](auto to) {
        using Out = decltype(to);
        auto* rows = reinterpret_cast<typename Out::Word*>(out.address);
        launch(lay_out_kernel<In, Out>, all.blocks * ranks, kThreads, stream, all, rows);
      };
      return out.dtype == Dtype::kFloat32 ? run(Float32{}) : run(in);
    });
  }
}

}  // namespace zerocast::cuda
