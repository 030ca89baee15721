// From run-time values to template arguments, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/amax.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("zerocast CUDA kernel: ") + cudaGetErrorString(status));
}

// Makes a device the current one for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_));
    if (device == before_) return;
    check(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// `bytes` is the dynamic shared memory of a thread block.
template <class... Parameters, class... Arguments>
void launch_with_shared_memory(int bytes, void (*kernel)(Parameters...), int64_t blocks, dim3 threads, Stream stream,
                               Arguments... arguments) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::invalid_argument("more thread blocks than a launch can have");
  const DeviceGuard guard(stream.device);
  // Without it a thread block has at most 48 KB, those of its variables included.
  if (bytes > 0) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, reinterpret_cast<cudaStream_t>(stream.handle)>>>(arguments...);
  check(cudaGetLastError());
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, Stream stream, Arguments... arguments) {
  launch_with_shared_memory(0, kernel, blocks, threads, stream, arguments...);
}

inline const int64_t* table_of(const Work& work) { return reinterpret_cast<const int64_t*>(work.table); }
inline const Item* items_of(const Work& work) { return reinterpret_cast<const Item*>(work.items); }
inline BaseList bases_of(DeviceBases bases) { return {reinterpret_cast<const uint64_t*>(bases)}; }
inline Amaxes amaxes_of(Array packed) { return {reinterpret_cast<void*>(packed.address), packed.dtype == Dtype::kBfloat16}; }
inline const bool* flag_of(Flag flag) { return reinterpret_cast<const bool*>(flag); }

template <class Body>
void for_storage(Dtype dtype, const Body& body) {
  if (dtype == Dtype::kFloat32) return body(Float32{});
  if (dtype == Dtype::kBfloat16) return body(Bfloat16{});
  return body(Float16{});
}

// Calls body(storage, nominal) with the storage type of the masters and the nominal type.
template <class Body>
void for_masters(Dtype master, Dtype nominal, const Body& body) {
  if (master == Dtype::kFloat32 && nominal == Dtype::kBfloat16) return body(Float32{}, Bfloat16{});
  if (master == Dtype::kFloat32 && nominal == Dtype::kFloat16) return body(Float32{}, Float16{});
  if (master == Dtype::kFloat32 && nominal == Dtype::kFloat32) return body(Float32{}, Float32{});
  if (master == Dtype::kBfloat16 && nominal == Dtype::kBfloat16) return body(Bfloat16{}, Bfloat16{});
  if (master == Dtype::kFloat16 && nominal == Dtype::kFloat16) return body(Float16{}, Float16{});
  throw std::invalid_argument("masters are float32 or of the nominal dtype");
}

// Calls body(gradient storage).
template <class Body>
void for_grad(Dtype grad, const Body& body) {
  if (grad == Dtype::kFloat32) return body(Float32{});
  if (grad == Dtype::kBfloat16) return body(Bfloat16{});
  throw std::invalid_argument("gradients are float32 or bfloat16");
}

// Calls body(gradient storage, moment storage).
template <class Body>
void for_states(const AdamState& state, const Body& body) {
  if (state.exp_avg.dtype != state.exp_avg_sq.dtype) throw std::invalid_argument("both moments have one dtype");
  for_grad(state.grad.dtype, [&](auto grad) {
    if (state.exp_avg.dtype == Dtype::kFloat32) return body(grad, Float32{});
    if (state.exp_avg.dtype == Dtype::kBfloat16) return body(grad, Bfloat16{});
    throw std::invalid_argument("moments are float32 or bfloat16");
  });
}

template <Grid grid>
using GridConstant = std::integral_constant<Grid, grid>;

inline bool is(const Block& block, int64_t rows, int64_t columns) { return block.rows == rows && block.columns == columns; }

// Calls body with the kind of block grid of a format.
template <class Body>
void for_grid(const Format& format, const Body& body) {
  const Block &block = format.block, &own = format.columnwise_block;
  if (format.scale_group && !(is(block, 32, 32) && is(format.scale_group, 128, 128))) {
    throw std::invalid_argument("the CUDA kernels have no scale groups of this shape");
  }
  if (!block && !own) return body(GridConstant<Grid::kTensor>{});
  if (is(block, 1, 32) && !own) return body(GridConstant<Grid::kRows>{});
  if (is(block, 1, 32) && is(own, 32, 1)) return body(GridConstant<Grid::kRowsAndColumns>{});
  if (is(block, 16, 16) && !own) return body(GridConstant<Grid::kSquare16>{});
  if (is(block, 32, 32) && !own) return body(GridConstant<Grid::kSquare32>{});
  if (is(block, 128, 128) && !own) return body(GridConstant<Grid::kSquare128>{});
  throw std::invalid_argument("the CUDA kernels have no blocks of this shape");
}

// The scale rule that goes with a kind of grid.
__host__ __device__ constexpr ScaleRule rule_of(Grid grid) {
  return grid == Grid::kRows                                        ? ScaleRule::kBF16
         : grid == Grid::kSquare16                                  ? ScaleRule::kTwoLevel
         : grid == Grid::kSquare32 || grid == Grid::kRowsAndColumns ? ScaleRule::kE8M0
                                                                    : ScaleRule::kFP32;
}

}  // namespace zerocast::cuda
