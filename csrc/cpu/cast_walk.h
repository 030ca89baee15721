// Walks the owned elements of a panel for their codes; for partial_cast and adam_cast.
//
// The factors of the columns are expanded to a line, piece by piece, so that the loop over elements
// does not depend on blocks and divisions are done once a block.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "codec.h"
#include "cpu/master.h"
#include "cpu/panels.h"
#include "cpu/scale_groups.h"

namespace zerocast {

// The loops of partial_cast.inc for the dtypes of a master, its nominal dtype and its codes.
struct CastLoops {
  void (*cast)(const void* source, const float* multipliers, void* codes, int64_t n);
  void (*cast_twice)(const void* source, const float* rowwise, const float* columnwise, uint8_t* row_codes,
                     uint8_t* column_codes, int64_t n);
  void (*pack)(const uint8_t* codes, uint8_t* bytes, int64_t n);
  void (*load_amaxes)(Dtype dtype, const void* packed, float* amaxes, int64_t n);
  void (*multipliers)(const Format& format, float tensor_amax, const float* amaxes, const float* groups, float* out,
                      int64_t n);
  void (*repeat)(const float* values, int64_t width, float* line, int64_t n);
};

constexpr Block kWholeTensor{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()};
constexpr int64_t kPieceColumns =
    kColumnStep;  // a multiple of every block's columns; its line stays in the first-level cache

struct CastInputs {
  const Format& format;
  Array packed;
  const Bases& amaxes;
  const Bases& scales;
};

inline float scalar(const Bases& bases, const Weight& weight, column::Column base, column::Column offset) {
  return reinterpret_cast<const float*>(bases[weight[base]])[weight[offset]];
}

// A grid of blocks over a panel, with the multipliers of a band of rows. A band is a block row, or
// several rows if blocks are one row high, whose amaxes are contiguous.
class GridMultipliers {
 public:
  GridMultipliers(const CastInputs& in, const CastLoops& loops, const Panel& panel, Block block, column::Column first_amax)
      : in_(in),
        loops_(loops),
        panel_(panel),
        block_(block ? block : kWholeTensor),
        blocks_((panel.columns() - 1) / block_.columns + 1),
        band_rows_(block_.rows == 1 && panel.columns() == panel.pitch ? std::min(block_.columns, kBandRows) : block_.rows),
        row_stride_(block_.rows == 1 ? blocks_ : 0),
        first_amax_(first_amax) {
    if (in.format.scale_rule == ScaleRule::kTwoLevel) {
      tensor_amax_ = scalar(in.amaxes, panel.weight, column::AMAX_BASE, column::AMAX_OFFSET);
    }
  }

  void enter(int64_t row) {
    if (row < next_band_) return;
    band_ = row;
    next_band_ = std::min(panel_.last_row, row / band_rows_ * band_rows_ + std::min(band_rows_, panel_.last_row));
    laid_out_ = -1;
    if (in_.format.amax_policy == AmaxPolicy::kDelayed) {
      values_[0] = scalar(in_.scales, panel_.weight, column::SCALE_BASE, column::SCALE_OFFSET);
    } else {
      prepare();
    }
    if (block_.columns == kWholeTensor.columns) line_.fill(values_[0]);
  }

  // The multipliers of n columns of a row from the panel's column `first`, a multiple of
  // kPieceColumns.
  const float* piece(int64_t row, int64_t first, int64_t n) {
    if (block_.columns == kWholeTensor.columns) return line_.data();
    const float* values = values_.data() + (row - band_) * row_stride_ + first / block_.columns;
    if (block_.columns == 1) return values;
    if (laid_out_ != first + n || row_stride_) {  // rows of a narrow weight share their only piece
      loops_.repeat(values, block_.columns, line_.data(), n);
      laid_out_ = first + n;
    }
    return line_.data();
  }

 private:
  static constexpr int64_t kBandRows = 32;

  void prepare() {
    const int64_t across = (panel_.pitch - 1) / block_.columns + 1;
    const int64_t index = panel_.weight[first_amax_] + band_ / block_.rows * across + panel_.first_column / block_.columns;
    const int64_t n = blocks_ * (row_stride_ ? next_band_ - band_ : 1);
    const int64_t size = size_of(in_.packed.dtype);
    std::array<float, kPieceColumns> amaxes, groups;
    for (int64_t i = 0; i < n; i += kPieceColumns) {
      const int64_t m = std::min(kPieceColumns, n - i);
      const auto* packed = reinterpret_cast<const void*>(in_.packed.address + (index + i) * size);
      loops_.load_amaxes(in_.packed.dtype, packed, amaxes.data(), m);
      if (in_.format.scale_group) {
        const GridShape shape = grid_shape(block_, panel_.weight.rows(), panel_.pitch);
        const PackedGrid grid{in_.packed, panel_.weight[first_amax_], shape, loops_.load_amaxes};
        group_amaxes(in_.format, grid, band_ / block_.rows, panel_.first_column / block_.columns + i, m, groups.data());
      }
      loops_.multipliers(in_.format, tensor_amax_, amaxes.data(), groups.data(), values_.data() + i, m);
    }
  }

  const CastInputs& in_;
  const CastLoops& loops_;
  const Panel& panel_;
  const Block block_;
  const int64_t blocks_;  // across the panel
  const int64_t band_rows_;
  const int64_t row_stride_;  // between the values of two rows; 0 if the rows of a band share them
  const column::Column first_amax_;
  float tensor_amax_ = 0.0f;
  int64_t band_ = 0, next_band_ = 0;
  int64_t laid_out_ = -1;  // where the piece in line_ ends
  alignas(64) std::array<float, kPieceColumns> line_;
  alignas(64) std::array<float, kPanelColumns> values_;
};

// Calls body(element, piece, offset, n) for the owned pieces of a row: n elements from flat index
// `element`, at columns piece + offset and up of the panel.
template <class Body>
void for_pieces(const Panel& panel, int64_t row, const Body& body) {
  const Panel::Segment owned = panel.owned(row);
  for (int64_t column = owned.first; column < owned.last;) {
    const int64_t in_panel = column - panel.first_column;
    const int64_t piece = in_panel / kPieceColumns * kPieceColumns;
    const int64_t n = std::min(owned.last - column, piece + kPieceColumns - in_panel);
    body(row * panel.pitch + column, piece, in_panel - piece, n);
    column += n;
  }
}

// Writes n owned codes from a flat index on; `origin` is the address of element 0, which may not exist.
struct Bytes {
  const CastLoops& loops;
  uintptr_t origin;

  void write(const void* source, const float* multipliers, int64_t element, int64_t n) const {
    loops.cast(source, multipliers, reinterpret_cast<void*>(origin + element), n);
  }
};

struct Nibbles {
  const CastLoops& loops;
  uintptr_t origin;

  // A byte with one owned code keeps its other half.
  void write(const void* source, const float* multipliers, int64_t element, int64_t n) const {
    alignas(64) std::array<uint8_t, kPieceColumns> codes;
    loops.cast(source, multipliers, codes.data(), n);
    int64_t first = element, last = element + n;
    const uint8_t* code = codes.data();
    if (first % 2) {
      at(first) = static_cast<uint8_t>((at(first) & 0x0F) | (*code++ << 4));
      ++first;
    }
    if (first < last && last % 2) {
      --last;
      at(last) = static_cast<uint8_t>((at(last) & 0xF0) | code[last - first]);
    }
    if (first < last) loops.pack(code, &at(first), (last - first) / 2);
  }

 private:
  uint8_t& at(int64_t element) const { return *reinterpret_cast<uint8_t*>(origin + element / 2); }
};

template <class Codes>
void cast_panel(const CastInputs& in, const CastLoops& loops, const Panel& panel, const Master& master, const Codes& codes) {
  GridMultipliers grid(in, loops, panel, in.format.block, column::ROW_AMAX);
  for (int64_t row = panel.first_row; row < panel.last_row; ++row) {
    grid.enter(row);
    for_pieces(panel, row, [&](int64_t element, int64_t piece, int64_t offset, int64_t n) {
      codes.write(master.at(element), grid.piece(row, piece, offset + n) + offset, element, n);
    });
  }
}

}  // namespace zerocast
