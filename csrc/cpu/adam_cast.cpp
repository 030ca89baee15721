// Stage adam_cast: AdamW on whole rows of blocks, their amaxes, and their codes while they are still
// cached.
#include "codec.h"
#include "cpu/adam.h"
#include "cpu/one_pass.h"
#include "cpu/simd.h"
#include "cpu/stages.h"

#define ZC_LOOPS "adam.inc"
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
  walk_in_one_pass(format, masters_of(states), table, packed, row_data, amax_loops, cast_loops, threads, update_row);
}

}  // namespace zerocast::cpu
