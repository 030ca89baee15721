// Instruction sets of the hot loops, chosen at run time so that one build runs on every machine of
// its architecture.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ZC_X86_LEVELS 1
#else
#define ZC_X86_LEVELS 0  // baseline only: other compilers lack `#pragma GCC target`
#endif

#include <string>
#include <vector>

namespace zerocast::simd {

enum class Level : int { kBaseline, kAvx2, kAvx512 };

Level level();

// The levels that this machine can use, best first, and the choice among them for tests; throws
// std::invalid_argument for any other name.
std::vector<std::string> levels();
std::string level_name();
void set_level(const std::string& name);

}  // namespace zerocast::simd

// The variant of `function` for the current level, from a file that at_every_level.h has compiled.
#if ZC_X86_LEVELS
#define ZC_AT_LEVEL(function)                                                       \
  (::zerocast::simd::level() == ::zerocast::simd::Level::kAvx512 ? avx512::function \
   : ::zerocast::simd::level() == ::zerocast::simd::Level::kAvx2 ? avx2::function   \
                                                                 : baseline::function)
#else
#define ZC_AT_LEVEL(function) (baseline::function)
#endif
