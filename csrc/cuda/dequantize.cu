// Stage dequantize: one direction of one weight back to floating point, in the weight's own
// orientation.
//
// A thread block takes 64 x 64 elements of the stored matrix, a thread eight neighbouring codes of
// two rows. Transposed data is transposed back in shared memory. Rows that are no multiple of eight
// codes and unaligned data are processed one element at a time.
#include <algorithm>

#include "cuda/codes.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kSide = 64, kEight = 8, kAcross = kSide / kEight, kThreads = 256;
constexpr int kPitch = kSide + 2;  // so that neighbouring rows begin in neighbouring banks

// Scales by block: entry (i, j) of the grid of the stored matrix.
struct Factors {
  ScaleRule rule;
  const uint8_t* buffer;
  const float* tensor_amax;
  int32_t block_rows, block_columns;  // of the stored matrix; 0 is the whole matrix
  int64_t stride, column_stride;      // entries from block row to block row, and from block to block

  // Columns of eight neighbours begin at a multiple of eight.
  __device__ bool is_same_for_eight() const { return block_columns % kEight == 0; }

  __device__ float of(int32_t row, int32_t column) const {
    const int64_t index = block_rows ? row / block_rows * stride + column / block_columns * column_stride : 0;
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
  return {format.scale_rule,
          reinterpret_cast<const uint8_t*>(weight.scale_inv),
          reinterpret_cast<const float*>(weight.amax),
          static_cast<int32_t>(block.rows),
          static_cast<int32_t>(block.columns),
          buffer.repeat * buffer.columns,
          buffer.repeat_columns};
}

// The codes of eight neighbouring elements, the first of them word-aligned, or one code.
template <class E>
struct Codes {
  typename Codes8<E>::Word word;

  __device__ static Codes load(const uint8_t* data, int64_t index) {
    return {*reinterpret_cast<const typename Codes8<E>::Word*>(data + index * E::kBits / 8)};
  }
  __device__ int32_t operator[](int i) const {
    constexpr int32_t kMask = (1 << E::kBits) - 1;
    if constexpr (E::kBits == 4)
      return word >> 4 * i & kMask;
    else
      return (i < 4 ? word.x : word.y) >> 8 * (i % 4) & kMask;
  }
};

template <class E>
__device__ int32_t code_at(const uint8_t* data, int64_t index) {
  if constexpr (E::kBits == 8) return data[index];
  return data[index / 2] >> (index % 2 * 4) & 0xF;
}

template <class Word>
__device__ void store_eight(Word* at, const Word (&words)[kEight]) {
  constexpr int kFours = sizeof(Word) * kEight / sizeof(uint4);
  uint4 fours[kFours];
  memcpy(fours, words, sizeof fours);
#pragma unroll
  for (int i = 0; i < kFours; ++i) reinterpret_cast<uint4*>(at)[i] = fours[i];
}

// `rows` and `columns` are those of the stored matrix. If `whole`, eight elements of a row, or of a
// column when transposed, can be read and written at once.
template <class E, class Out, bool kTransposed>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const uint8_t* data, Factors factors, int32_t rows, int32_t columns, bool whole, typename Out::Word* out) {
  using Word = typename Out::Word;
  __shared__ Word tile[kTransposed ? kSide : 1][kPitch];
  const int32_t across = (columns - 1) / kSide + 1, down = blockIdx.x / across;
  const int32_t first_row = down * kSide, first_column = (blockIdx.x - down * across) * kSide;
  const int32_t l = threadIdx.x % kAcross, column = first_column + l * kEight;
#pragma unroll
  for (int r = threadIdx.x / kAcross; r < kSide; r += kThreads / kAcross) {
    const int32_t row = first_row + r;
    if (row >= rows || column >= columns) continue;
    const int64_t index = static_cast<int64_t>(row) * columns + column;
    Word words[kEight];
    if (whole) {
      const Codes<E> codes = Codes<E>::load(data, index);
      float same = 0.0f;
      if (factors.is_same_for_eight()) same = factors.of(row, column);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        const float factor = factors.is_same_for_eight() ? same : factors.of(row, column + i);
        words[i] = Out::narrow(decode<E>(codes[i]) * factor);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        if (column + i < columns)
          words[i] = Out::narrow(decode<E>(code_at<E>(data, index + i)) * factors.of(row, column + i));
      }
    }
    if constexpr (kTransposed) {
#pragma unroll
      for (int i = 0; i < kEight; ++i) tile[l * kEight + i][r] = words[i];
    } else if (whole) {
      store_eight(out + index, words);
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        if (column + i < columns) out[index + i] = words[i];
      }
    }
  }
  if constexpr (kTransposed) {
    __syncthreads();
    const int32_t row = first_row + l * kEight;
#pragma unroll
    for (int c = threadIdx.x / kAcross; c < kSide; c += kThreads / kAcross) {
      if (row >= rows || first_column + c >= columns) continue;
      Word* at = out + static_cast<int64_t>(first_column + c) * rows + row;
      Word words[kEight];
#pragma unroll
      for (int i = 0; i < kEight; ++i) words[i] = tile[c][l * kEight + i];
      if (whole) {
        store_eight(at, words);
      } else {
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          if (row + i < rows) at[i] = words[i];
        }
      }
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
  if (rows > INT32_MAX || columns > INT32_MAX) throw std::invalid_argument("at most 2^31 - 1 rows and columns");
  const int64_t blocks = ((rows + kSide - 1) / kSide) * ((columns + kSide - 1) / kSide);
  const bool whole = columns % kEight == 0 && (!transposed || rows % kEight == 0) && weight.data % sizeof(uint2) == 0 &&
                     out.address % sizeof(uint4) == 0;
  for_element(format.element, [&](auto element) {
    for_storage(out.dtype, [&](auto target) {
      using Out = decltype(target);
      const auto kernel =
          transposed ? decode_kernel<decltype(element), Out, true> : decode_kernel<decltype(element), Out, false>;
      launch(kernel, blocks, kThreads, stream, reinterpret_cast<const uint8_t*>(weight.data), factors,
             static_cast<int32_t>(rows), static_cast<int32_t>(columns), whole,
             reinterpret_cast<typename Out::Word*>(out.address));
    });
  });
}

}  // namespace zerocast::cuda
