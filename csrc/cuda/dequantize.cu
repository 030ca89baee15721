// Stage dequantize: one direction of one weight back to floating point, in the weight's own orientation.
//
// A warp takes 32 x 32 elements. Transposed data is read along its own rows and turned in shared memory.
#include <algorithm>

#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kSide = 32, kSideRows = 8;

// Scales by block: entry (i, j) of the grid of the stored matrix.
struct Factors {
  ScaleRule rule;
  const uint8_t* buffer;
  const float* tensor_amax;
  Block block;     // of the stored matrix; {0, 0} is the whole
  int64_t stride;  // entries from block row to block row

  __device__ float of(int64_t row, int64_t column) const {
    const int64_t index = block ? row / block.rows * stride + column / block.columns : 0;
    if (rule == ScaleRule::kE8M0) return e8m0_value(buffer[index]);
    if (rule == ScaleRule::kTwoLevel) return two_level_value(buffer[index], *tensor_amax);
    return reinterpret_cast<const float*>(buffer)[index];
  }
};

Factors factors_of(const Format& format, const Quantized& weight, bool transposed) {
  const bool own = weight.columnwise && format.columnwise == Columnwise::kOwnGrid;
  const ScaleBuffer buffer = weight.columnwise ? columnwise_scale_buffer(format, weight.rows, weight.columns)
                                               : rowwise_scale_buffer(format, weight.rows, weight.columns);
  Block block = own ? format.columnwise_block : format.block;
  if (transposed) block = {block.columns, block.rows};
  return {format.scale_rule, reinterpret_cast<const uint8_t*>(weight.scale_inv), reinterpret_cast<const float*>(weight.amax),
          block, buffer.repeat * buffer.columns};
}

template <class E>
__device__ float value_at(const uint8_t* data, int64_t index) {
  if constexpr (E::kBits == 8) return decode<E>(data[index]);
  return decode<E>(data[index / 2] >> (index % 2 * 4) & 0xF);
}

// `rows` and `columns` are those of the stored matrix.
template <class E, class Out, bool kTransposed>
__global__ void decode_kernel(const uint8_t* data, Factors factors, int64_t rows, int64_t columns, typename Out::Word* out) {
  __shared__ float tile[kSide][kSide + 1];
  const int64_t across = (columns + kSide - 1) / kSide;
  const int64_t first_row = blockIdx.x / across * kSide, first_column = blockIdx.x % across * kSide;
  for (int r = threadIdx.y; r < kSide; r += kSideRows) {
    const int64_t row = first_row + r, column = first_column + threadIdx.x;
    if (row >= rows || column >= columns) continue;
    const float value = value_at<E>(data, row * columns + column) * factors.of(row, column);
    if constexpr (kTransposed) {
      tile[r][threadIdx.x] = value;
    } else {
      out[row * columns + column] = Out::narrow(value);
    }
  }
  if constexpr (kTransposed) {
    __syncthreads();
    for (int r = threadIdx.y; r < kSide; r += kSideRows) {
      const int64_t row = first_row + threadIdx.x, column = first_column + r;
      if (row < rows && column < columns) out[column * rows + row] = Out::narrow(tile[threadIdx.x][r]);
    }
  }
}

template <class In, class Out>
__global__ void convert_kernel(const typename In::Word* data, int64_t numel, typename Out::Word* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < numel; i += step) {
    out[i] = Out::narrow(In::widen(data[i]));
  }
}

template <class Body>
void for_element(Element element, const Body& body) {
  if (element == Element::kE4M3) return body(E4M3{});
  if (element == Element::kE5M2) return body(E5M2{});
  return body(E2M1{});
}

void convert(const Quantized& weight, Array out, Stream stream) {
  constexpr int64_t kThreads = 256, kMostBlocks = 4096;
  const int64_t numel = weight.rows * weight.columns, blocks = std::min(kMostBlocks, (numel + kThreads - 1) / kThreads);
  for_storage(weight.data_dtype, [&](auto in) {
    for_storage(out.dtype, [&](auto target) {
      using In = decltype(in);
      using Out = decltype(target);
      launch(convert_kernel<In, Out>, blocks, kThreads, stream, reinterpret_cast<const typename In::Word*>(weight.data),
             numel, reinterpret_cast<typename Out::Word*>(out.address));
    });
  });
}

}  // namespace

void dequantize(const Format& format, const Quantized& weight, Array out, Stream stream) {
  if (format.element == Element::kNominal) return convert(weight, out, stream);
  const bool transposed = weight.columnwise && format.columnwise == Columnwise::kTranspose;
  const int64_t rows = transposed ? weight.columns : weight.rows, columns = transposed ? weight.rows : weight.columns;
  const Factors factors = factors_of(format, weight, transposed);
  const int64_t blocks = ((rows + kSide - 1) / kSide) * ((columns + kSide - 1) / kSide);
  for_element(format.element, [&](auto element) {
    for_storage(out.dtype, [&](auto target) {
      using Out = decltype(target);
      const auto kernel =
          transposed ? decode_kernel<decltype(element), Out, true> : decode_kernel<decltype(element), Out, false>;
      launch(kernel, blocks, dim3(kSide, kSideRows), stream, reinterpret_cast<const uint8_t*>(weight.data), factors, rows,
             columns, reinterpret_cast<typename Out::Word*>(out.address));
    });
  });
}

}  // namespace zerocast::cuda
