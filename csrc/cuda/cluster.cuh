// Maxima over the thread blocks of a cluster.
#pragma once

#include <cstdint>

#include "cuda/geometry.h"

namespace zerocast::cuda {

// The largest of kNumbers numbers that each thread block has. A cluster may be one thread block.
//
// Thread blocks send each other their numbers. What orders memory:
// * fence.mbarrier_init makes the barrier of a thread block valid before other threads are behind the
//   wait of the cluster, and only then do they send.
// * A barrier cannot complete before its one arrival, which expects the bytes of all messages, however
//   many have come before.
// * Numbers have no first value that could be written after a message: each is written by its message.
// * A message writes its number before it completes, which is a release in the cluster. Threads read once
//   they have seen all messages complete, which is an acquire in the cluster.
// * A thread block waits for all messages to it, so none comes after its end.
// Without messages a second barrier of the cluster would have to order the numbers. Its arrival, as a
// release, waits until all stores of the thread to global memory are done, and there are many.
template <int kBlocks, int kNumbers>
class ClusterMaxima {
 public:
  // The whole thread block calls `begin` before it synchronizes, and `begun` after that.
  __device__ void begin() const {
    if constexpr (kBlocks > 1) {
      if (threadIdx.x != 0) return;
      const uint32_t barrier = address(&shared().barrier);
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(sizeof(Shared::numbers))
                   : "memory");
    }
  }
  __device__ void begun() const {
    if constexpr (kBlocks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  // The whole cluster calls it once. All threads of a warp pass the same number, `index`, and its value in
  // their thread block; one warp `sends` it.
  __device__ float largest(int index, float value, bool sends) const {
    if constexpr (kBlocks > 1) {
      const int lane = threadIdx.x % kWarpLanes;
      float (&numbers)[kBlocks] = shared().numbers[index];
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      if (sends && lane < kBlocks) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                         in_block(lane, &numbers[blockIdx.x % kBlocks])),
                     "r"(__float_as_uint(value)), "r"(in_block(lane, &shared().barrier))
                     : "memory");
      }
      asm volatile(
          "{ .reg .pred done;\n"
          "WAIT:\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
          "@!done bra WAIT; }" ::"r"(address(&shared().barrier))
          : "memory");
#pragma unroll
      for (const float number : numbers) value = fmaxf(value, number);
    }
    return value;
  }

 private:
  struct Shared {
    uint64_t barrier;
    float numbers[kNumbers][kBlocks];
  };
  __device__ static Shared& shared() {
    __shared__ Shared shared;
    return shared;
  }
  __device__ static uint32_t address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }
  // The address of the same variable of another thread block.
  __device__ static uint32_t in_block(int rank, const void* at) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(at)), "r"(rank));
    return there;
  }
};

}  // namespace zerocast::cuda
