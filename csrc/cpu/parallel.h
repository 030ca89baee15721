// One parallel loop over the tasks of all weights of a stage.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cstdint>

namespace zerocast {

// Sets the IEEE default for this thread while it lives: a caller that flushes subnormals
// (torch.set_flush_denormal) would change bits.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&caller_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&caller_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t caller_;
};

// Threads take tasks in runs, so that many small tasks cost no more than a few large ones.
template <class Body>
void parallel_for(int64_t tasks, int threads, const Body& body) {
  // A region of OpenMP with one thread takes 0.5 µs, as long as decoding half of a 64x64 weight.
  if (threads <= 1 || tasks <= 1) {
    const DefaultFloatingPoint ieee;
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  [[maybe_unused]] const int64_t run = std::clamp<int64_t>(tasks / (8 * static_cast<int64_t>(threads)), 1, 16);
#pragma omp parallel num_threads(threads)
  {
    const DefaultFloatingPoint ieee;
#pragma omp for schedule(dynamic, run)
    for (int64_t task = 0; task < tasks; ++task) body(task);
  }
}

}  // namespace zerocast
