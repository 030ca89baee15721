// Stage adam_amax: AdamW on the owned elements of a table; their amaxes are taken while still
// cached.
#include "codec.h"
#include "cpu/adam.h"
#include "cpu/amax_walk.h"
#include "cpu/simd.h"
#include "cpu/stages.h"

#define ZC_LOOPS "adam_step.inc"
#include "cpu/at_every_level.h"
#define ZC_LOOPS "partial_amax.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {

void adam_amax(const Format& format, Dtype nominal, const std::vector<AdamState>& states, const Table& table,
               const int64_t* groups, const float* scalars, float clip, Array packed, int threads) {
  if (states.empty()) return;
  std::vector<Array> masters;
  for (const AdamState& state : states) masters.push_back({state.master, Dtype::kFloat32});
  const AdamLoop update = ZC_AT_LEVEL(adam_loop)(states[0].grad.dtype, states[0].exp_avg.dtype);
  const auto update_row = [&](const Panel& panel, int64_t row, Panel::Segment owned) {
    if (owned.first >= owned.last) return;
    const Weight& weight = panel.weight;
    const int64_t element = row * panel.pitch + owned.first - weight.start();
    const int64_t group = groups[(weight.row - table.rows) / column::WIDTH];
    update_run(update, states[weight[column::MASTER_BASE]], weight[column::MASTER_OFFSET] + element,
               owned.last - owned.first, reinterpret_cast<const AdamScalars*>(scalars)[group], clip);
  };
  walk_amaxes(format, nominal, masters, table, packed, threads, ZC_AT_LEVEL(amax_loops), update_row);
}

}  // namespace zerocast::cpu
