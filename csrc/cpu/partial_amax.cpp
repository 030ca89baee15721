// Stage partial_amax: the amax of every block that holds an owned element, from one pass over the
// owned elements.
#include "codec.h"
#include "cpu/amax_walk.h"
#include "cpu/simd.h"
#include "cpu/stages.h"

#define ZC_LOOPS "partial_amax.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {

void partial_amax(const Format& format, Dtype nominal, const std::vector<Array>& masters, const Table& table, Array packed,
                  int threads) {
  const auto nothing = [](const Panel&, int64_t, Panel::Segment) {};
  walk_amaxes(format, nominal, masters, table, packed, threads, ZC_AT_LEVEL(amax_loops), nothing);
}

}  // namespace zerocast::cpu
