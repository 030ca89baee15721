// Stage adam_cast: AdamW on whole rows of blocks, their amaxes, and their codes while they are still
// cached.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "codec.h"
#include "cpu/adam.h"
#include "cpu/amax_walk.h"
#include "cpu/cast_walk.h"
#include "cpu/simd.h"
#include "cpu/stages.h"

#define ZC_LOOPS "adam_step.inc"
#include "cpu/at_every_level.h"
#define ZC_LOOPS "partial_amax.inc"
#include "cpu/at_every_level.h"
#define ZC_LOOPS "partial_cast.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {

void adam_cast(const Format& format, Dtype nominal, const std::vector<AdamState>& states, const Table& table,
               const int64_t* groups, const float* scalars, float clip, Array packed, const Bases& row_data, int threads) {
  check_whole_blocks(format, table);
  if (states.empty()) return;
  const RowUpdate update_row{ZC_AT_LEVEL(adam_loop)(states[0].grad.dtype, states[0].exp_avg.dtype),
                             states,
                             table,
                             groups,
                             reinterpret_cast<const AdamScalars*>(scalars),
                             clip};
  const AmaxLoops amax_loops = ZC_AT_LEVEL(amax_loops)(Dtype::kFloat32, nominal, packed.dtype);
  const CastLoops cast_loops = ZC_AT_LEVEL(cast_loops)(Dtype::kFloat32, nominal, format.element);
  const std::vector<Array> masters = masters_of(states);
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
      one_grid(format, amax_loops, band, master, packed, update_row);
      if (format.elements_per_byte() == 2) {
        cast_panel(in, cast_loops, band, master, Nibbles{cast_loops, data});
      } else {
        cast_panel(in, cast_loops, band, master, Bytes{cast_loops, data});
      }
    }
  });
}

}  // namespace zerocast::cpu
