// Stage adam_amax: AdamW on the owned elements of a table; their amaxes are taken while still
// cached.
#include "codec.h"
#include "cpu/adam.h"
#include "cpu/amax_walk.h"
#include "cpu/simd.h"
#include "cpu/stages.h"

#define ZC_LOOPS "adam.inc"
#include "cpu/at_every_level.h"
#define ZC_LOOPS "partial_amax.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {

void adam_amax(const Format& format, Dtype nominal, const std::vector<AdamState>& states, const Table& table,
               const int64_t* groups, const float* scalars, float clip, Array packed, int threads) {
  if (states.empty()) return;
  const RowUpdate update_row{ZC_AT_LEVEL(adam_loop)(states[0].grad.dtype, states[0].exp_avg.dtype),
                             states,
                             table,
                             groups,
                             reinterpret_cast<const AdamScalars*>(scalars),
                             clip};
  walk_amaxes(format, nominal, masters_of(states), table, packed, threads, ZC_AT_LEVEL(amax_loops), update_row);
}

}  // namespace zerocast::cpu
