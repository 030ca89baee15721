// Stage dequantize: one direction of one weight back to floating point, in the weight's own
// orientation.
//
// A thread block takes 32 x 256 elements of the stored matrix, or 64 x 64 of transposed data, which
// is transposed back in shared memory. A thread takes eight neighbouring codes of some rows and has
// all of them on their way at once. Rows that are no multiple of eight codes and unaligned data are
// processed one element at a time.
#include <algorithm>

#include "cuda/codes.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

constexpr int kEight = 8, kThreads = 256;

// The elements of a thread block.
template <bool kTransposed>
struct Extent {
  static constexpr int kRows = kTransposed ? 64 : 32, kColumns = kTransposed ? 64 : 256;
  static constexpr int kAcross = kColumns / kEight, kDown = kThreads / kAcross;  // threads
  static constexpr int kPasses = kRows / kDown;
};
constexpr int kPitch = Extent<true>::kRows + 2;  // padded so that neighbouring rows begin in neighbouring banks

// Scales by block: entry (i, j) of the grid of the stored matrix.
struct Factors {
  ScaleRule rule;
  const uint8_t* buffer;
  const float* tensor_amax;
  int32_t row_bits, column_bits;  // log2 of a block of the stored matrix; 31 is the whole matrix
  int64_t stride, column_stride;  // entries from block row to block row, and from block to block

  // Columns of eight neighbours begin at a multiple of eight.
  __device__ bool is_same_for_eight() const { return column_bits >= 3; }

  // `load` returns the stored scale of an element, and a second function decodes it: a thread
  // issues all its loads before it waits for any.
  __device__ uint32_t load(int32_t row, int32_t column) const {
    const int64_t index = (row >> row_bits) * stride + (column >> column_bits) * column_stride;
    if (rule == ScaleRule::kFP32) return reinterpret_cast<const uint32_t*>(buffer)[index];
    return rule == ScaleRule::kBF16 ? reinterpret_cast<const uint16_t*>(buffer)[index] : buffer[index];
  }
  __device__ float value(uint32_t stored) const {
    if (rule == ScaleRule::kE8M0) return e8m0_value(static_cast<int32_t>(stored));
    if (rule == ScaleRule::kTwoLevel) return two_level_value(static_cast<int32_t>(stored), *tensor_amax);
    return float_of(static_cast<int32_t>(rule == ScaleRule::kBF16 ? stored << 16 : stored));
  }
  __device__ float of(int32_t row, int32_t column) const { return value(load(row, column)); }
};

// Extents of blocks are powers of two.
int32_t log2_of(int64_t extent) {
  int32_t bits = extent ? 0 : 31;
  while (extent >> (bits + 1)) ++bits;
  return bits;
}

Factors factors_of(const Format& format, const Quantized& weight, bool transposed) {
  const bool own = weight.columnwise && format.columnwise == Columnwise::kOwnGrid;
  const ScaleBuffer buffer = weight.columnwise ? columnwise_scale_buffer(format, weight.rows, weight.columns)
                                               : rowwise_scale_buffer(format, weight.rows, weight.columns);
  Block block = own ? format.columnwise_block : format.block;
  if (transposed) block = {block.columns, block.rows};
  return {format.scale_rule,
          reinterpret_cast<const uint8_t*>(weight.scale_inv),
          reinterpret_cast<const float*>(weight.amax),
          log2_of(block.rows),
          log2_of(block.columns),
          buffer.repeat * buffer.columns,
          buffer.repeat_columns};
}

template <class E>
__device__ int32_t code_at(const uint8_t* data, int64_t index) {
  if constexpr (E::kBits == 8) return data[index];
  return data[index / 2] >> (index % 2 * 4) & 0xF;
}

// Eight neighbouring elements of the result.
template <class Out>
struct Words {
  typename Out::Word word[kEight];

  __device__ void set(int pair, float2 y) {
    if constexpr (std::is_same_v<Out, Bfloat16>) {
      const __nv_bfloat162 rounded = __floats2bfloat162_rn(y.x, y.y);
      memcpy(word + 2 * pair, &rounded, sizeof rounded);
    } else if constexpr (std::is_same_v<Out, Float16>) {
      const __half2 rounded = __floats2half2_rn(y.x, y.y);
      memcpy(word + 2 * pair, &rounded, sizeof rounded);
    } else {
      memcpy(word + 2 * pair, &y, sizeof y);
    }
  }

  __device__ void store(typename Out::Word* at) const {
    uint4 fours[sizeof word / sizeof(uint4)];
    memcpy(fours, word, sizeof word);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof word / sizeof(uint4)); ++i) reinterpret_cast<uint4*>(at)[i] = fours[i];
  }
};

template <class E, class Out>
__device__ Words<Out> dequantized(typename Codes8<E>::Word codes, const Factors& factors, uint32_t stored, int32_t row,
                                  int32_t column) {
  float2 y[kEight / 2];
  Decoder<E>::decode8(codes, y);
  Words<Out> words;
  if (factors.is_same_for_eight()) {
    const float factor = factors.value(stored);
#pragma unroll
    for (int i = 0; i < kEight / 2; ++i) words.set(i, {y[i].x * factor, y[i].y * factor});
  } else {
#pragma unroll
    for (int i = 0; i < kEight / 2; ++i) {
      words.set(i, {y[i].x * factors.of(row, column + 2 * i), y[i].y * factors.of(row, column + 2 * i + 1)});
    }
  }
  return words;
}

// `rows` and `columns` are the shape of the stored matrix. If `whole`, eight elements of a row, or
// of a column when transposed, can be read and written together.
template <class E, class Out, bool kTransposed>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const uint8_t* data, Factors factors, int32_t rows, int32_t columns, bool whole, typename Out::Word* out) {
  using Word = typename Out::Word;
  using Eight = typename Codes8<E>::Word;
  using Of = Extent<kTransposed>;
  __shared__ Word tile[kTransposed ? Of::kColumns : 1][kPitch];
  const int32_t across = (columns - 1) / Of::kColumns + 1, down = blockIdx.x / across;
  const int32_t first_row = down * Of::kRows, first_column = (blockIdx.x - down * across) * Of::kColumns;
  const int32_t l = threadIdx.x % Of::kAcross, first_r = threadIdx.x / Of::kAcross, column = first_column + l * kEight;
  Eight codes[Of::kPasses] = {};
  uint32_t stored[Of::kPasses] = {};
  if (whole) {
#pragma unroll
    for (int i = 0; i < Of::kPasses; ++i) {
      const int64_t row = first_row + first_r + i * Of::kDown;
      if (row < rows && column < columns) {
        codes[i] = *reinterpret_cast<const Eight*>(data + (row * columns + column) * E::kBits / 8);
        stored[i] = factors.load(row, column);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Of::kPasses; ++i) {
    const int32_t r = first_r + i * Of::kDown, row = first_row + r;
    if (row >= rows || column >= columns) continue;
    const int64_t index = static_cast<int64_t>(row) * columns + column;
    if (!whole) {
#pragma unroll 1
      for (int c = 0; c < kEight && column + c < columns; ++c) {
        const Word word = Out::narrow(decode<E>(code_at<E>(data, index + c)) * factors.of(row, column + c));
        if constexpr (kTransposed) {
          tile[l * kEight + c][r] = word;
        } else {
          out[index + c] = word;
        }
      }
      continue;
    }
    const Words<Out> words = dequantized<E, Out>(codes[i], factors, stored[i], row, column);
    if constexpr (kTransposed) {
#pragma unroll
      for (int c = 0; c < kEight; ++c) tile[l * kEight + c][r] = words.word[c];
    } else {
      words.store(out + index);
    }
  }
  if constexpr (kTransposed) {
    __syncthreads();
    const int32_t row = first_row + l * kEight;
#pragma unroll
    for (int c = first_r; c < Of::kColumns; c += Of::kDown) {
      if (row >= rows || first_column + c >= columns) continue;
      Word* at = out + static_cast<int64_t>(first_column + c) * rows + row;
      Words<Out> words;
#pragma unroll
      for (int i = 0; i < kEight; ++i) words.word[i] = tile[c][l * kEight + i];
      if (whole) {
        words.store(at);
      } else {
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          if (row + i < rows) at[i] = words.word[i];
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
  if (element == Element::kInt4) return body(Int4{});
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
  const auto blocks_of = [&](auto extent) {
    return ((rows - 1) / extent.kRows + 1) * ((columns - 1) / extent.kColumns + 1);
  };
  const int64_t blocks = transposed ? blocks_of(Extent<true>{}) : blocks_of(Extent<false>{});
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
