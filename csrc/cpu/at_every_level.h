// Compiles the file ZC_LOOPS once for each instruction set, each in its own namespace.
//
// A stage includes this file after all others, so it has no include guard. A standard header
// included under a target pragma would define functions that the linker could select for machines
// without those instructions. For the same reason the loops are internal to their file, and
// codec.h, included before, is inlined into them. ZC_FUSES is 1 where every processor of the level
// multiplies and adds in one instruction: a pragma does not change the compiler's own macros.

#define ZC_FUSES 0
namespace zerocast::baseline {
namespace {
#include ZC_LOOPS
}  // namespace
}  // namespace zerocast::baseline

#if ZC_X86_LEVELS

#undef ZC_FUSES
#define ZC_FUSES 1
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,fma")
namespace zerocast::avx2 {
namespace {
#include ZC_LOOPS
}  // namespace
}  // namespace zerocast::avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace zerocast::avx512 {
namespace {
#include ZC_LOOPS
}  // namespace
}  // namespace zerocast::avx512
#pragma GCC pop_options

#endif

#undef ZC_FUSES
#undef ZC_LOOPS
