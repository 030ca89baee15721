#include "cpu/simd.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace zerocast::simd {
namespace {

const char* name_of(Level level) {
  switch (level) {
    case Level::kAvx512:
      return "avx512";
    case Level::kAvx2:
      return "avx2";
    case Level::kBaseline:
      break;
  }
  return "baseline";
}

std::vector<Level> usable() {
  std::vector<Level> found;
#if ZC_X86_LEVELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(Level::kAvx512);
  }
  if (avx2) found.push_back(Level::kAvx2);
#endif
  found.push_back(Level::kBaseline);
  return found;
}

std::atomic<Level>& current() {
  static std::atomic<Level> chosen{usable().front()};
  return chosen;
}

}  // namespace

Level level() { return current().load(std::memory_order_relaxed); }

std::string level_name() { return name_of(level()); }

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (Level level : usable()) names.emplace_back(name_of(level));
  return names;
}

void set_level(const std::string& name) {
  for (Level level : usable()) {
    if (name == name_of(level)) {
      current().store(level, std::memory_order_relaxed);
      return;
    }
  }
  std::string known;
  for (const std::string& level : levels()) known += " " + level;
  throw std::invalid_argument("SIMD level '" + name + "' is not usable here; usable:" + known);
}

}  // namespace zerocast::simd
