// Stage upcast: E2M1 codes with E8M0 or exact E4M3 scales as E4M3 codes of the same values, with one
// f32 scale a group of blocks or one of the tensor, of the weight or of its transpose.
//
// A task is a group. Its codes become E4M3 codes square by square, by a table for each spread of
// scales or each exact scale, and a transpose is one of squares of bytes.
#include <algorithm>
#include <array>
#include <stdexcept>

#include "codec.h"
#include "cpu/codes.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "scale_buffer.h"

namespace zerocast::cpu {
namespace {

using CodeTable = std::array<uint8_t, 16>;  // the E4M3 code of each E2M1 code

const std::array<CodeTable, kMostSpread + 1>& tables() {
  static const auto made = [] {
    const DefaultFloatingPoint ieee;
    std::array<CodeTable, kMostSpread + 1> all;
    for (int spread = 0; spread <= kMostSpread; ++spread) {
      for (int code = 0; code < 16; ++code) all[spread][code] = static_cast<uint8_t>(upcast_code(code, spread));
    }
    return all;
  }();
  return made;
}

const std::array<CodeTable, 256>& exact_tables() {
  static const auto made = [] {
    const DefaultFloatingPoint ieee;
    std::array<CodeTable, 256> all;
    for (int scale = 0; scale < 256; ++scale) {
      for (int code = 0; code < 16; ++code) all[scale][code] = static_cast<uint8_t>(exact_upcast_code(code, scale));
    }
    return all;
  }();
  return made;
}

// The rowwise codes and scales of a weight.
struct Source {
  const uint8_t* data;
  const uint8_t* scales;
  int64_t rows, columns, scale_stride;  // scale_stride: entries from a row of scales to the next
  Block block;
  bool exact_scales;

  int32_t stored_scale(int64_t row, int64_t column) const {
    return scales[row / block.rows * scale_stride + column / block.columns];
  }

  // At most kSquare codes of a row from the first one of a block on.
  void upcast_row(int64_t row, int64_t column, int32_t largest, uint8_t* codes) const {
    const int64_t end = std::min(columns, column + kSquare);
    for (int64_t first = column; first < end; first += block.columns) {
      const int32_t stored = stored_scale(row, first);
      const CodeTable& table = exact_scales ? exact_tables()[stored] : tables()[smaller(largest - stored, kMostSpread)];
      const uint8_t* from = data + (row * columns + first) / 2;
      for (int64_t i = 0; i < std::min(block.columns, end - first); i += 2) {
        *codes++ = table[from[i / 2] & 0xF];
        *codes++ = table[from[i / 2] >> 4];
      }
    }
  }
};

// A group of blocks, and where its E4M3 codes go.
struct Group {
  Source from;
  ByteMatrix to;
  bool transposed;
  int64_t first_row, first_column, last_row, last_column;

  int32_t largest_exponent() const {
    int32_t largest = 0;
    for (int64_t row = first_row; row < last_row; row += from.block.rows) {
      for (int64_t column = first_column; column < last_column; column += from.block.columns) {
        largest = larger(largest, from.stored_scale(row, column));
      }
    }
    return largest;
  }

  void upcast(int32_t largest) const {
    Square square{}, transpose_of;
    for (int64_t row = first_row; row < last_row; row += kSquare) {
      for (int64_t column = first_column; column < last_column; column += kSquare) {
        const int64_t height = std::min(kSquare, last_row - row);
        for (int64_t r = 0; r < height; ++r) from.upcast_row(row + r, column, largest, square.bytes[r]);
        if (transposed) {
          transpose(square, transpose_of);
          to.store(column, row, transpose_of);
        } else {
          to.store(row, column, square);
        }
      }
    }
  }
};

void upcast_weight(const Format& format, const Upcast& weight, int threads) {
  const Block groups = format.exact_scales ? Block{128, 128} : format.scale_group, block = format.block;
  if (format.element != Element::kE2M1 || !groups || groups.rows % kSquare || groups.columns % kSquare ||
      kSquare % block.columns) {
    throw std::invalid_argument("only E2M1 codes whose scales come in groups, or are exact, are exact in FP8");
  }
  const int64_t rows = weight.rows, columns = weight.columns;
  const ScaleBuffer scales = rowwise_scale_buffer(format, rows, columns);
  const Source from{reinterpret_cast<const uint8_t*>(weight.data),
                    reinterpret_cast<const uint8_t*>(weight.scale_inv),
                    rows,
                    columns,
                    scales.repeat * scales.columns,
                    block,
                    format.exact_scales};
  const ByteMatrix to{reinterpret_cast<uint8_t*>(weight.codes), weight.transposed ? columns : rows,
                      weight.transposed ? rows : columns};
  const GridShape grid = grid_shape(groups, rows, columns);
  const int64_t out_across = weight.transposed ? grid.down : grid.across, stride = round_up(out_across, 4);
  float* out_scales = reinterpret_cast<float*>(weight.group_scale_inv);
  if (format.exact_scales) *out_scales = exact_upcast_scale(*reinterpret_cast<const float*>(weight.amax));
  parallel_for(grid.down * grid.across, threads, [&](int64_t i) {
    const int64_t down = i / grid.across, across = i % grid.across;
    const int64_t row = down * groups.rows, column = across * groups.columns;
    const Group group{from,
                      to,
                      weight.transposed,
                      row,
                      column,
                      std::min(rows, row + groups.rows),
                      std::min(columns, column + groups.columns)};
    if (format.exact_scales) return group.upcast(0);
    const int32_t largest = group.largest_exponent();
    group.upcast(largest);
    const int64_t out_row = weight.transposed ? across : down, out_column = weight.transposed ? down : across;
    out_scales[out_row * stride + out_column] = upcast_scale(largest);
    if (out_column + 1 == out_across)
      std::fill(out_scales + out_row * stride + out_across, out_scales + (out_row + 1) * stride, 1.0f);
  });
}

}  // namespace

void upcast(const Format& format, const std::vector<Upcast>& weights, int threads) {
  for (const Upcast& weight : weights) upcast_weight(format, weight, threads);
}

}  // namespace zerocast::cpu
