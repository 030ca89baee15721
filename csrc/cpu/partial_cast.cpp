// Stage partial_cast: the codes of the owned elements, from one pass over them.
//
// A format with two grids gets both codes from one read of an element.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cpu/cast_walk.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stages.h"

#define ZC_LOOPS "partial_cast.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {
namespace {

void cast_panel_twice(const CastInputs& in, const CastLoops& loops, const Panel& panel, const Master& master,
                      uintptr_t rowwise, uintptr_t columnwise) {
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
  const CastInputs in{format, packed, amaxes, scales};
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

}  // namespace zerocast::cpu
