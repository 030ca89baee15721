// Differences between the compilers of these headers.
#pragma once

#if defined(__CUDACC__)
#define ZC_HD __host__ __device__ __forceinline__
#else
#define ZC_HD __attribute__((always_inline)) inline
#endif
