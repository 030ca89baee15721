// Stage partial_amax: one read of the owned master elements.
#include "cuda/amax.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

template <class Storage, Grid kGrid>
__global__ void __launch_bounds__(kPanelThreads)
    amax_kernel(Format format, const int64_t* table, const Item* items, BaseList masters, AmaxSink out) {
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  Lane lane;
  if (!find_lane(panel_grid(format, w), w, item.ordinal, panel_rows(format), lane)) return;
  const MasterReader<Storage> read{origin_of<Storage>(masters, w)};
  PanelAmaxes<kGrid> amaxes(lane, w, format, out);
  Elements x;
  for (int first = 0; first < panel_rows(kGrid); first += kPanelRows) {
    read(down(lane, first), x);
#pragma unroll
    for (int r = 0; r < kPanelRows; ++r) amaxes.row(first + r, x[r]);
  }
  amaxes.finish();
}

}  // namespace

void partial_amax(const Format& format, Dtype nominal, Dtype master, DeviceBases masters, const Work& work, Array packed,
                  Stream stream) {
  for_storage(master, [&](auto storage) {
    for_grid(format, [&](auto grid) {
      launch(amax_kernel<decltype(storage), decltype(grid)::value>, work.blocks, kPanelThreads, stream, format,
             table_of(work), items_of(work), bases_of(masters), AmaxSink{amaxes_of(packed), nominal});
    });
  });
}

}  // namespace zerocast::cuda
