// Walks owned whole rows of blocks: an action on each row, then the amaxes of a row of blocks, and its
// codes while it is still cached; for adam_cast and adam_8bit_cast.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/amax_walk.h"
#include "cpu/cast_walk.h"

namespace zerocast {

// `before` as in walk_amaxes.
template <class Before>
void walk_in_one_pass(const Format& format, const std::vector<Array>& masters, const Table& table, Array packed,
                      const Bases& row_data, const AmaxLoops& amax_loops, const CastLoops& cast_loops, int threads,
                      const Before& before) {
  const Bases none;
  const CastInputs in{format, packed, none, none};
  const int64_t height = format.exchange_block().rows;
  const std::vector<Panel> panels = owned_panels(format, table, {height, kPanelColumns, threads});
  parallel_for(static_cast<int64_t>(panels.size()), threads, [&](int64_t i) {
    const Master master(masters, panels[i].weight);
    const Weight& weight = panels[i].weight;
    const uintptr_t data = row_data[weight[column::ROW_DATA_BASE]] + weight[column::ROW_DATA_OFFSET];
    Panel band = panels[i];  // a row of blocks
    for (; band.first_row < panels[i].last_row; band.first_row = band.last_row) {
      band.last_row = std::min(band.first_row + height, panels[i].last_row);
      one_grid(format, amax_loops, band, master, packed, before);
      if (format.elements_per_byte() == 2) {
        cast_panel(in, cast_loops, band, master, Nibbles{cast_loops, data});
      } else {
        cast_panel(in, cast_loops, band, master, Bytes{cast_loops, data});
      }
    }
  });
}

}  // namespace zerocast
