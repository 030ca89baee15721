// Stage transpose: columnwise copies from the gathered rowwise bytes.
//
// Works on squares of codes: 64 whole cache lines are read, transposed in the first-level cache,
// and written as 64 whole cache lines.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/codes.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"
#include "scale_buffer.h"

namespace zerocast::cpu {
namespace {

constexpr int64_t kStripRows = 1024;

// kSquare byte columns of some rows of one weight.
struct Strip {
  ByteMatrix from, to;
  int64_t codes_per_byte;
  int64_t first_row, last_row, column;
};

// A transposed row of bytes holds two rows of codes; `rows`, an even number, of its bytes are used.
void store_pairs(const Strip& strip, int64_t row, int64_t rows, const Square& transposed) {
  const int64_t pairs = std::min(kSquare, strip.from.columns - strip.column);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t even = 2 * (strip.column + i);
    repack_even(transposed.bytes[i], strip.to.at(even, row / 2), rows / 2);
    repack_odd(transposed.bytes[i], strip.to.at(even + 1, row / 2), rows / 2);
  }
}

void transpose_strip(const Strip& strip) {
  Square square{}, transposed;
  for (int64_t row = strip.first_row; row < strip.last_row; row += kSquare) {
    strip.from.load(row, strip.column, square);
    transpose(square, transposed);
    if (strip.codes_per_byte == 1) {
      strip.to.store(strip.column, row, transposed);
    } else {
      store_pairs(strip, row, std::min(kSquare, strip.from.rows - row), transposed);
    }
  }
}

void add_strips(std::vector<Strip>& strips, const ByteMatrix& from, const ByteMatrix& to, int64_t codes_per_byte) {
  for (int64_t row = 0; row < from.rows; row += kStripRows) {
    for (int64_t column = 0; column < from.columns; column += kSquare) {
      strips.push_back({from, to, codes_per_byte, row, std::min(from.rows, row + kStripRows), column});
    }
  }
}

// A band of buffer rows of transposed scales: one column of the grid, repeated and padded.
struct ScaleRow {
  ScaleBuffer from, to;
  const uint8_t* source;
  uint8_t* out;
  int64_t row;  // a multiple of to.repeat
};

void fill(const ScaleRow& s) {
  const int64_t bytes = s.to.row_bytes(), rows = std::min(s.to.repeat, s.to.rows - s.row);
  uint8_t* line = s.out + s.row * bytes;
  if (s.row >= s.to.used_rows()) return s.to.pad(line, rows * s.to.columns);
  const uint8_t* entry = s.source + s.row / s.to.repeat * s.from.entry;
  const int64_t step = s.from.repeat * s.from.row_bytes(), across = s.to.grid.across;
  for (int64_t i = 0; i < across; ++i) std::memcpy(line + i * s.to.entry, entry + i * step, s.to.entry);
  s.to.pad(line + across * s.to.entry, s.to.columns - across);
  for (int64_t row = 1; row < rows; ++row) std::memcpy(line + row * bytes, line, bytes);
}

}  // namespace

void transpose(const Format& format, const Table& table, const Bases& row_data, const Bases& row_scales,
               const Bases& column_data, const Bases& column_scales, int threads) {
  std::vector<Strip> strips;
  std::vector<ScaleRow> scale_rows;
  const auto at = [](const Bases& bases, const Weight& w, column::Column base, column::Column offset, int64_t entry) {
    return reinterpret_cast<uint8_t*>(bases[w[base]] + w[offset] * entry);
  };
  for (int64_t i = 0; i < table.size; ++i) {
    const Weight w = table[i];
    uint8_t* rowwise = at(row_data, w, column::ROW_DATA_BASE, column::ROW_DATA_OFFSET, 1);
    uint8_t* columnwise = at(column_data, w, column::COLUMN_DATA_BASE, column::COLUMN_DATA_OFFSET, 1);
    const int64_t per_byte = format.elements_per_byte();
    add_strips(strips, {rowwise, w.rows(), w.columns() / per_byte}, {columnwise, w.columns(), w.rows() / per_byte},
               per_byte);
    if (!format.block) continue;
    ScaleRow s{rowwise_scale_buffer(format, w.rows(), w.columns()), columnwise_scale_buffer(format, w.rows(), w.columns()),
               nullptr, nullptr, 0};
    s.source = at(row_scales, w, column::ROW_SCALE_BASE, column::ROW_SCALE_OFFSET, s.from.entry);
    s.out = at(column_scales, w, column::COLUMN_SCALE_BASE, column::COLUMN_SCALE_OFFSET, s.to.entry);
    for (; s.row < s.to.rows; s.row += s.to.repeat) scale_rows.push_back(s);
  }
  parallel_for(static_cast<int64_t>(strips.size()), threads, [&](int64_t i) { transpose_strip(strips[i]); });
  parallel_for(static_cast<int64_t>(scale_rows.size()), threads, [&](int64_t i) { fill(scale_rows[i]); });
}

}  // namespace zerocast::cpu
