// Stage transpose: columnwise copies from the gathered rowwise bytes.
//
// A thread reads 16 bytes of 4 rows (8 rows of 4-bit codes), transposes them in registers into
// words along a column, and stores those in shared memory, from which columns are written 256 bytes
// (128 of 4-bit codes) at a time.
#include "cuda/dispatch.cuh"
#include "cuda/scale_entries.cuh"
#include "cuda/stages.h"
#include "cuda/turning.cuh"

namespace zerocast::cuda {
namespace {

__device__ uint8_t* address(const Bases& bases, int64_t base, int64_t offset) {
  return reinterpret_cast<uint8_t*>(bases.array ? reinterpret_cast<const uint64_t*>(bases.array)[base] : bases.few[base]) +
         offset;
}

struct Matrix {
  uint8_t* data;
  int64_t rows, bytes;  // bytes per row

  __device__ uint8_t* at(int64_t row, int64_t byte) const { return data + row * bytes + byte; }
};

// Transposes two rows of codes to pairs of their even and of their odd columns.
__device__ inline void transpose_nibbles(uint32_t& even, uint32_t& odd) {
  const uint32_t low = (even & 0x0F0F0F0Fu) | (odd << 4 & 0xF0F0F0F0u);
  odd = (even >> 4 & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
  even = low;
}

// Reads a word of a row as far as the matrix goes; 0 beyond.
__device__ uint32_t read_word(const Matrix& m, int64_t row, int64_t byte) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    if (row < m.rows && byte + i < m.bytes) word |= static_cast<uint32_t>(*m.at(row, byte + i)) << (8 * i);
  }
  return word;
}

__device__ uint4 read16(const Matrix& m, int64_t row, int64_t byte) {
  if (row < m.rows && byte + 16 <= m.bytes && reinterpret_cast<uint64_t>(m.at(row, byte)) % 16 == 0) {
    return *reinterpret_cast<const uint4*>(m.at(row, byte));
  }
  return {read_word(m, row, byte), read_word(m, row, byte + 4), read_word(m, row, byte + 8), read_word(m, row, byte + 12)};
}

__device__ void write16(const Matrix& m, int64_t row, int64_t byte, uint4 words) {
  if (row >= m.rows || byte >= m.bytes) return;
  if (byte + 16 <= m.bytes && reinterpret_cast<uint64_t>(m.at(row, byte)) % 16 == 0) {
    *reinterpret_cast<uint4*>(m.at(row, byte)) = words;
    return;
  }
  for (int i = 0; i < 16 && byte + i < m.bytes; ++i) *m.at(row, byte + i) = (&words.x)[i / 4] >> (i % 4 * 8);
}

// Transposes word i of the 16 bytes of all rows and calls put(column, word), with columns counted
// from the first of the 16 bytes.
template <bool kNibbles, int kRows, class Put>
__device__ void transpose_words(uint4 (&rows)[kRows], int i, const Put& put) {
  if constexpr (kNibbles) {
    uint32_t even[4], odd[4];  // byte columns: pairs of rows, of even and of odd codes
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      even[pair] = (&rows[2 * pair].x)[i];
      odd[pair] = (&rows[2 * pair + 1].x)[i];
      transpose_nibbles(even[pair], odd[pair]);
    }
    transpose_bytes(even);
    transpose_bytes(odd);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      put(8 * i + 2 * c, even[c]);
      put(8 * i + 2 * c + 1, odd[c]);
    }
  } else {
    uint32_t words[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) words[r] = (&rows[r].x)[i];
    transpose_bytes(words);
#pragma unroll
    for (int c = 0; c < 4; ++c) put(4 * i + c, words[c]);
  }
}

template <bool kNibbles>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(Format format, const int64_t* table, const Item* items, const __grid_constant__ Bases row_data,
                     const __grid_constant__ Bases column_data) {
  constexpr int kPerByte = kNibbles ? 2 : 1;
  constexpr int kRows = 4 * kPerByte, kColumns = 16 * kPerByte;  // extent that a thread processes at a time
  constexpr int kDown = kTransposeThreads / 8, kSteps = kTransposeRows / (kDown * kRows);
  constexpr int kTransposed = kTransposeBytes * kPerByte, kWords = kTransposeRows / kRows;  // columns, and words of each
  __shared__ uint32_t transposed[kTransposed * kWords];
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const Matrix from{address(row_data, w[column::ROW_DATA_BASE], w[column::ROW_DATA_OFFSET]), w.rows(),
                    w.columns() / kPerByte};
  const Matrix to{address(column_data, w[column::COLUMN_DATA_BASE], w[column::COLUMN_DATA_OFFSET]), w.columns(),
                  w.rows() / kPerByte};
  const uint32_t across = transpose_grid(format, w).across, down = item.ordinal / across;
  const int64_t first_row = static_cast<int64_t>(down) * kTransposeRows;
  const int64_t first_byte = static_cast<int64_t>(item.ordinal - down * across) * kTransposeBytes;

  const int lane = threadIdx.x % 8, strip = threadIdx.x / 8;
  uint4 rows[kSteps][kRows];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[step][r] = read16(from, first_row + (step * kDown + strip) * kRows + r, first_byte + lane * 16);
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const auto put = [&](int column, uint32_t word) {
      transposed[place<kWords, kColumns>(lane * kColumns + column, step * kDown + strip)] = word;
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) transpose_words<kNibbles>(rows[step], i, put);
  }
  __syncthreads();
  constexpr int kPieces = kWords / 4;  // pieces of 16 bytes per column
  for (int i = threadIdx.x; i < kTransposed * kPieces; i += kTransposeThreads) {
    const int column = i / kPieces, piece = i % kPieces;
    const uint4 words = *reinterpret_cast<const uint4*>(transposed + place<kWords, kColumns>(column, piece * 4));
    write16(to, first_byte * kPerByte + column, first_row / kPerByte + piece * 16, words);
  }
}

// A thread takes 16 bytes of some rows of the columnwise buffer.
template <Grid kGrid>
__global__ void __launch_bounds__(kScaleThreads)
    transpose_scales_kernel(Format given, const int64_t* table, const Item* items, const __grid_constant__ Bases row_scales,
                            const __grid_constant__ Bases column_scales) {
  constexpr bool kBytes = rule_of(kGrid) != ScaleRule::kFP32;
  Format format = known<kGrid>(given);
  format.scale_rule = rule_of(kGrid);
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const ScaleBuffer from = rowwise_scale_buffer(format, w.rows(), w.columns());
  const ScaleBuffer to = columnwise_scale_buffer(format, w.rows(), w.columns());
  const uint32_t thread = item.ordinal * kScaleThreads + threadIdx.x;
  if (thread >= scale_threads(to)) return;
  const uint32_t across = scale_threads_across(to), rows = scale_rows(to), grid_rows = to.rows / to.repeat;
  const uint32_t tall = thread / across, first_byte = (thread - tall * across) * kScaleBytes;
  const uint32_t row_bytes = to.row_bytes();
  const uint8_t* source = address(row_scales, w[column::ROW_SCALE_BASE], w[column::ROW_SCALE_OFFSET] * to.entry);
  uint8_t* out = address(column_scales, w[column::COLUMN_SCALE_BASE], w[column::COLUMN_SCALE_OFFSET] * to.entry);
#pragma unroll 1
  for (uint32_t down = tall * rows; down < min(tall * rows + rows, grid_rows); ++down) {
    const auto entry = [&](uint32_t column) -> uint32_t {
      const int64_t index = static_cast<int64_t>(column) * from.repeat * from.columns + down;
      const bool used = down < to.grid.down && column < to.grid.across;
      if constexpr (kBytes) return used ? source[index] : 0u;
      return used ? reinterpret_cast<const uint32_t*>(source)[index] : 0x3F800000u;
    };
    ScaleWords words;
#pragma unroll
    for (uint32_t i = 0; i < kScaleWords; ++i) {
      if constexpr (kBytes) {
        const uint32_t column = first_byte + 4 * i;
        words[i] = word_of({entry(column), entry(column + 1), entry(column + 2), entry(column + 3)});
      } else {
        words[i] = entry(first_byte / 4 + i);
      }
    }
    uint8_t* row = out + static_cast<int64_t>(down) * to.repeat * row_bytes;
    for (int r = 0; r < to.repeat; ++r, row += row_bytes) write_words(row, first_byte, row_bytes, words);
  }
}

}  // namespace

void transpose(const Format& format, const Work& data, const Work& scales, const Bases& row_data, const Bases& row_scales,
               const Bases& column_data, const Bases& column_scales, Stream stream) {
  const auto kernel = format.elements_per_byte() == 2 ? transpose_kernel<true> : transpose_kernel<false>;
  launch(kernel, data.blocks, kTransposeThreads, stream, format, table_of(data), items_of(data), row_data, column_data);
  if (scales.blocks == 0) return;
  for_grid(format, [&](auto grid) {
    if constexpr (side_of(decltype(grid)::value)) {
      launch(transpose_scales_kernel<decltype(grid)::value>, scales.blocks, kScaleThreads, stream, format, table_of(scales),
             items_of(scales), row_scales, column_scales);
    }
  });
}

}  // namespace zerocast::cuda
