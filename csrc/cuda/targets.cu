#include "cuda/stages.h"

namespace zerocast::cuda {

const char* targets() { return ZC_CUDA_TARGETS; }

}  // namespace zerocast::cuda
