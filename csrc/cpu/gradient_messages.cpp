// Stages quantize_gradient and add_gradients: a gradient on its way between ranks, in groups of FP8 codes or
// as it is.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stages.h"
#include "gradient_message.h"

namespace zerocast {
namespace {

using EncodeGroup = float (*)(const void* elements, int64_t n, uint8_t* codes);  // returns scale_inv

struct AddLoops {
  void (*decode)(const uint8_t* codes, float scale_inv, bool first, float* total, int64_t n);
  void (*widen)(const void* elements, bool first, float* total, int64_t n);
  void (*put_mean)(const float* total, float divisor, bool adds, float* out, int64_t n);
};

}  // namespace
}  // namespace zerocast

#define ZC_LOOPS "gradient_messages.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {
namespace {

constexpr int64_t kRun = 32 * kGradientGroup;  // elements whose sums stay in the first-level cache

int64_t runs_of(const GradientMessage& part) { return (part.numel + kRun - 1) / kRun; }

// `add_sender(sender, first, total, n)` adds elements [first, first + n) of a sender to the total, which the first
// sender sets.
template <class AddSender>
void add_senders(int64_t parts, int64_t divisor, bool adds, Array out, int64_t numel, int threads, const AddLoops& loops,
                 const AddSender& add_sender) {
  if (out.dtype != Dtype::kFloat32) throw std::invalid_argument("gradients are added in float32");
  parallel_for(runs_of({numel}), threads, [&](int64_t task) {
    const int64_t first = task * kRun, n = std::min(numel - first, kRun);
    alignas(64) std::array<float, kRun> total;
    for (int64_t sender = 0; sender < parts; ++sender) add_sender(sender, first, total.data(), n);
    auto* target = reinterpret_cast<float*>(out.address) + first;
    loops.put_mean(total.data(), static_cast<float>(divisor), adds, target, n);
  });
}

}  // namespace

void quantize_gradient(Array grad, int64_t numel, int64_t parts, uintptr_t messages, int threads) {
  const GradientMessage part{numel / parts};
  const EncodeGroup encode = ZC_AT_LEVEL(encode_group_of)(grad.dtype);
  const int64_t runs = runs_of(part);
  parallel_for(parts * runs, threads, [&](int64_t task) {
    const int64_t index = task / runs, first = task % runs * kRun, last = std::min(part.numel, first + kRun);
    const uintptr_t elements = grad.address + index * part.numel * size_of(grad.dtype);
    auto* message = reinterpret_cast<uint8_t*>(messages) + index * part.bytes();
    for (int64_t i = first; i < last; i += kGradientGroup) {
      const int64_t n = std::min<int64_t>(kGradientGroup, last - i);
      const float scale_inv = encode(reinterpret_cast<const void*>(elements + i * size_of(grad.dtype)), n, message + i);
      std::memcpy(message + part.scales_at() + i / kGradientGroup * 4, &scale_inv, sizeof scale_inv);
    }
    if (last == part.numel) {
      std::fill(message + part.numel, message + part.scales_at(), uint8_t{0});
      std::fill(message + part.scales_end(), message + part.bytes(), uint8_t{0});
    }
  });
}

void add_gradients(uintptr_t messages, int64_t parts, int64_t divisor, bool adds, Array out, int64_t numel, int threads) {
  const GradientMessage part{numel};
  const AddLoops loops = ZC_AT_LEVEL(add_loops)(Dtype::kFloat32);
  const auto add_message = [&](int64_t sender, int64_t first, float* total, int64_t n) {
    const auto* message = reinterpret_cast<const uint8_t*>(messages) + sender * part.bytes();
    for (int64_t i = first; i < first + n; i += kGradientGroup) {
      float scale_inv;
      std::memcpy(&scale_inv, message + part.scales_at() + i / kGradientGroup * 4, sizeof scale_inv);
      const int64_t of_group = std::min<int64_t>(kGradientGroup, first + n - i);
      loops.decode(message + i, scale_inv, sender == 0, total + (i - first), of_group);
    }
  };
  add_senders(parts, divisor, adds, out, numel, threads, loops, add_message);
}

void add_plain_gradients(Array gradients, int64_t parts, int64_t divisor, bool adds, Array out, int64_t numel, int threads) {
  const AddLoops loops = ZC_AT_LEVEL(add_loops)(gradients.dtype);
  const auto add_part = [&](int64_t sender, int64_t first, float* total, int64_t n) {
    const uintptr_t elements = gradients.address + (sender * numel + first) * size_of(gradients.dtype);
    loops.widen(reinterpret_cast<const void*>(elements), sender == 0, total, n);
  };
  add_senders(parts, divisor, adds, out, numel, threads, loops, add_part);
}

}  // namespace zerocast::cpu
