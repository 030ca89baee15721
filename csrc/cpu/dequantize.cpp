// Stage dequantize: one direction of one weight back to floating point, in the weight's own
// orientation.
//
// As in partial_cast, the scales of the columns are expanded to a line once a block row of the
// output. Transposed data is first transposed back, square by square, into rows of codes.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "codec.h"
#include "cpu/codes.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stages.h"
#include "scale_buffer.h"

namespace zerocast {
namespace {

struct DecodeLoops {
  void (*decode)(const uint8_t* codes, const float* factors, void* out, int64_t n);
  void (*convert)(const void* source, void* out, int64_t n);
};

}  // namespace
}  // namespace zerocast

#define ZC_LOOPS "dequantize.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {
namespace {

constexpr int64_t kColumns = 8 * kSquare;

// Scales of the output's blocks: block (i, j) has entry i * down + j * across of the buffer.
struct Factors {
  ScaleRule rule;
  const uint8_t* buffer;
  float tensor_amax;
  Block block;
  int64_t down, across;

  float value(int64_t index) const {
    if (rule == ScaleRule::kE8M0) return e8m0_value(buffer[index]);
    if (rule == ScaleRule::kTwoLevel) return two_level_value(buffer[index], tensor_amax);
    if (rule == ScaleRule::kBF16) return Bfloat16::widen(reinterpret_cast<const uint16_t*>(buffer)[index]);
    return reinterpret_cast<const float*>(buffer)[index];
  }

  void line(int64_t row, int64_t column, int64_t n, float* out) const {
    const int64_t first = block ? row / block.rows * down : 0;
    for (int64_t i = 0; i < n;) {
      const int64_t j = block ? (column + i) / block.columns : 0;
      const int64_t last = block ? std::min(n, (j + 1) * block.columns - column) : n;
      std::fill(out + i, out + last, value(first + j * across));
      i = last;
    }
  }
};

Factors factors_of(const Format& format, const Quantized& weight, bool transposed) {
  const bool own = weight.columnwise && format.columnwise == Columnwise::kOwnGrid;
  const ScaleBuffer buffer = weight.columnwise ? columnwise_scale_buffer(format, weight.rows, weight.columns)
                                               : rowwise_scale_buffer(format, weight.rows, weight.columns);
  Factors f{format.scale_rule,
            reinterpret_cast<const uint8_t*>(weight.scale_inv),
            0.0f,
            own ? format.columnwise_block : format.block,
            buffer.repeat * buffer.columns,
            buffer.repeat_columns};
  if (format.scale_rule == ScaleRule::kTwoLevel) f.tensor_amax = *reinterpret_cast<const float*>(weight.amax);
  if (transposed) {
    std::swap(f.down, f.across);
    std::swap(f.block.rows, f.block.columns);
  }
  return f;
}

// Rows of codes of a tile of the output, one code a byte, at most kSquare rows by kColumns columns.
class CodeRows {
 public:
  CodeRows(const ByteMatrix& stored, int64_t codes_per_byte, bool transposed)
      : stored_(stored), packed_(codes_per_byte == 2), transposed_(transposed) {}

  void load(int64_t first_row, int64_t rows, int64_t first_column, int64_t columns) {
    codes_at_ = codes_[0];
    pitch_ = kColumns;
    if (transposed_) return load_transposed(first_row, rows, first_column, columns);
    if (packed_) {
      for (int64_t r = 0; r < rows; ++r) unpack(stored_.at(first_row + r, first_column / 2), codes_[r], columns / 2);
    } else {  // read where they are stored
      codes_at_ = stored_.at(first_row, first_column);
      pitch_ = stored_.columns;
    }
  }
  const uint8_t* row(int64_t r) const { return codes_at_ + r * pitch_; }

 private:
  // With two codes a byte, a transposed row of bytes holds two rows of codes.
  void load_transposed(int64_t first_row, int64_t rows, int64_t first_column, int64_t columns) {
    Square square{}, transposed;
    for (int64_t c = 0; c < columns; c += kSquare) {
      stored_.load(first_column + c, packed_ ? first_row / 2 : first_row, square);
      transpose(square, transposed);
      for (int64_t r = 0; r < rows; ++r) {
        if (!packed_) {
          std::memcpy(codes_[r] + c, transposed.bytes[r], kSquare);
        } else if (r % 2 == 0) {
          unpack_even(transposed.bytes[r / 2], codes_[r] + c, kSquare);
        } else {
          unpack_odd(transposed.bytes[r / 2], codes_[r] + c, kSquare);
        }
      }
    }
  }

  const ByteMatrix& stored_;
  const bool packed_;
  const bool transposed_;
  const uint8_t* codes_at_ = nullptr;
  int64_t pitch_ = 0;
  alignas(64) uint8_t codes_[kSquare][kColumns];
};

void convert(const DecodeLoops& loops, const Quantized& weight, Array out, int threads) {
  constexpr int64_t kRun = 64 * 1024;
  const int64_t numel = weight.rows * weight.columns;
  parallel_for((numel + kRun - 1) / kRun, threads, [&](int64_t i) {
    const int64_t first = i * kRun, n = std::min(kRun, numel - first);
    loops.convert(reinterpret_cast<const void*>(weight.data + first * size_of(weight.data_dtype)),
                  reinterpret_cast<void*>(out.address + first * size_of(out.dtype)), n);
  });
}

}  // namespace

void dequantize(const Format& format, const Quantized& weight, Array out, int threads) {
  const DecodeLoops loops = ZC_AT_LEVEL(decode_loops)(weight.data_dtype, format.element, out.dtype);
  if (format.element == Element::kNominal) return convert(loops, weight, out, threads);
  const bool transposed = weight.columnwise && format.columnwise == Columnwise::kTranspose;
  const int64_t rows = weight.rows, columns = weight.columns;
  const int64_t per_byte = format.elements_per_byte();
  const ByteMatrix stored{reinterpret_cast<uint8_t*>(weight.data), transposed ? columns : rows,
                          (transposed ? rows : columns) / per_byte};
  const Factors factors = factors_of(format, weight, transposed);
  const int64_t across = (columns + kColumns - 1) / kColumns, down = (rows + kSquare - 1) / kSquare;
  parallel_for(down * across, threads, [&](int64_t i) {
    const int64_t first_row = i / across * kSquare, first_column = i % across * kColumns;
    const int64_t height = std::min(kSquare, rows - first_row), width = std::min(kColumns, columns - first_column);
    CodeRows codes(stored, per_byte, transposed);
    codes.load(first_row, height, first_column, width);
    alignas(64) std::array<float, kColumns> line;
    for (int64_t r = 0; r < height; ++r) {
      const int64_t row = first_row + r;
      if (r == 0 || (factors.block && row % factors.block.rows == 0)) factors.line(row, first_column, width, line.data());
      const uintptr_t at = out.address + (row * columns + first_column) * size_of(out.dtype);
      loops.decode(codes.row(r), line.data(), reinterpret_cast<void*>(at), width);
    }
  });
}

}  // namespace zerocast::cpu
