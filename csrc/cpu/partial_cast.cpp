// Stage partial_cast: the codes of the owned elements, from one pass over them.
//
// The factors of the columns are expanded to a line, piece by piece, so that the loop over elements
// does not depend on blocks and divisions are done once a block. A format with two grids gets both
// codes from one read of an element.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "codec.h"
#include "cpu/master.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"
#include "cpu/scale_groups.h"
#include "cpu/simd.h"
#include "cpu/stages.h"

namespace zerocast {
namespace {

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

}  // namespace
}  // namespace zerocast

#define ZC_LOOPS "partial_cast.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {
namespace {

constexpr Block kWholeTensor{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()};
constexpr int64_t kPieceColumns =
    kColumnStep;  // a multiple of every block's columns; its line stays in the first-level cache

struct Inputs {
  const Format& format;
  Array packed;
  const Bases& amaxes;
  const Bases& scales;
};

float scalar(const Bases& bases, const Weight& weight, column::Column base, column::Column offset) {
  return reinterpret_cast<const float*>(bases[weight[base]])[weight[offset]];
}

// A grid of blocks over a panel, with the multipliers of a band of rows. A band is a block row, or
// several rows if blocks are one row high, whose amaxes are contiguous.
class GridMultipliers {
 public:
  GridMultipliers(const Inputs& in, const CastLoops& loops, const Panel& panel, Block block, column::Column first_amax)
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

  const Inputs& in_;
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

// Writes n owned codes from a flat index on; `origin` is the address of element 0, which may not
// exist.
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
      uint8_t& byte = at(first++);
      byte = static_cast<uint8_t>((byte & 0x0F) | (*code++ << 4));
    }
    if (first < last && last % 2) {
      uint8_t& byte = at(--last);
      byte = static_cast<uint8_t>((byte & 0xF0) | code[last - first]);
    }
    if (first < last) loops.pack(code, &at(first), (last - first) / 2);
  }

 private:
  uint8_t& at(int64_t element) const { return *reinterpret_cast<uint8_t*>(origin + element / 2); }
};

template <class Codes>
void cast_panel(const Inputs& in, const CastLoops& loops, const Panel& panel, const Master& master, const Codes& codes) {
  GridMultipliers grid(in, loops, panel, in.format.block, column::ROW_AMAX);
  for (int64_t row = panel.first_row; row < panel.last_row; ++row) {
    grid.enter(row);
    for_pieces(panel, row, [&](int64_t element, int64_t piece, int64_t offset, int64_t n) {
      codes.write(master.at(element), grid.piece(row, piece, offset + n) + offset, element, n);
    });
  }
}

void cast_panel_twice(const Inputs& in, const CastLoops& loops, const Panel& panel, const Master& master, uintptr_t rowwise,
                      uintptr_t columnwise) {
  GridMultipliers rows(in, loops, panel, in.format.block, column::ROW_AMAX);
  GridMultipliers columns(in, loops, panel, in.format.columnwise_block, column::COLUMN_AMAX);
  for (int64_t row = panel.first_row; row < panel.last_row; ++row) {
    rows.enter(row);
    columns.enter(row);
    for_pieces(panel, row, [&](int64_t element, int64_t piece, int64_t offset, int64_t n) {
      if (panel.columns() < panel.pitch) master.prefetch(element + panel.pitch, n);
      loops.cast_twice(master.at(element), rows.piece(row, piece, offset + n) + offset,
                       columns.piece(row, piece, offset + n) + offset, reinterpret_cast<uint8_t*>(rowwise + element),
                       reinterpret_cast<uint8_t*>(columnwise + element), n);
    });
  }
}

void copy_panel(const CastLoops& loops, const Panel& panel, const Master& master, uintptr_t data, int64_t size) {
  for (int64_t row = panel.first_row; row < panel.last_row; ++row) {
    for_pieces(panel, row, [&](int64_t element, int64_t, int64_t, int64_t n) {
      loops.cast(master.at(element), nullptr, reinterpret_cast<void*>(data + element * size), n);
    });
  }
}

}  // namespace

void partial_cast(const Format& format, Dtype nominal, const std::vector<Array>& masters, Array packed, const Bases& amaxes,
                  const Bases& scales, const Table& table, const Bases& row_data, const Bases& column_data, int threads) {
  // Multipliers of single columns are reused a row later: a panel of one piece keeps them cached.
  const int64_t row_step = std::clamp<int64_t>(std::max(format.block.rows, format.columnwise_block.rows), 1, 32);
  const int64_t most_columns = format.columnwise == Columnwise::kOwnGrid ? kPieceColumns : kPanelColumns;
  const std::vector<Panel> panels = owned_panels(format, table, {row_step, most_columns, threads});
  const Inputs in{format, packed, amaxes, scales};
  parallel_for(static_cast<int64_t>(panels.size()), threads, [&](int64_t i) {
    const Panel& panel = panels[i];
    const Weight& weight = panel.weight;
    const Master master(masters, weight);
    const CastLoops loops = ZC_AT_LEVEL(cast_loops)(master.dtype, nominal, format.element);
    const uintptr_t data = row_data[weight[column::ROW_DATA_BASE]] + weight[column::ROW_DATA_OFFSET];
    if (format.element == Element::kNominal) {
      copy_panel(loops, panel, master, data, size_of(nominal));
    } else if (format.elements_per_byte() == 2) {
      cast_panel(in, loops, panel, master, Nibbles{loops, data});
    } else if (format.columnwise == Columnwise::kOwnGrid) {
      const uintptr_t columns = column_data[weight[column::COLUMN_DATA_BASE]] + weight[column::COLUMN_DATA_OFFSET];
      cast_panel_twice(in, loops, panel, master, data, columns);
    } else {
      cast_panel(in, loops, panel, master, Bytes{loops, data});
    }
  });
}

void encode(Element element, const float* source, uint8_t* codes, int64_t numel) {
  const std::vector<float> ones(kPieceColumns, 1.0f);
  const auto cast = ZC_AT_LEVEL(cast_loops)(Dtype::kFloat32, Dtype::kFloat32, element).cast;
  for (int64_t i = 0; i < numel; i += kPieceColumns) {
    cast(source + i, ones.data(), codes + i, std::min(kPieceColumns, numel - i));
  }
}

void round_nominal(Dtype nominal, const float* source, void* words, int64_t numel) {
  ZC_AT_LEVEL(cast_loops)(Dtype::kFloat32, nominal, Element::kNominal).cast(source, nullptr, words, numel);
}

}  // namespace zerocast::cpu
