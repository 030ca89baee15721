// Stage partial_amax: one read of the owned master elements.
#include "cuda/amax.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

// Thread blocks a multiprocessor: kernels with shuffles need more warps to hide latency, the others
// more registers.
constexpr int min_blocks(Grid grid) { return has_rows(grid) ? 3 : 1; }

template <class Storage, Grid kGrid>
__global__ void __launch_bounds__(kAmaxShape.threads(), min_blocks(kGrid))
    amax_kernel(Format format, const int64_t* table, const Item* items, BaseList masters, AmaxSink out) {
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const AmaxLane lane = find_lane<kAmaxShape.lane_columns>(panel_grid(known<kGrid>(format), w, kAmaxShape), w, item.ordinal,
                                                           panel_rows(kGrid), kAmaxShape.warps);
  const MasterReader<Storage, kAmaxShape.lane_columns> masters_of(lane, origin_of<Storage>(masters, w), panel_rows(kGrid));
  const AmaxPlace place{lane, w, out};
  PanelAmaxes<kGrid> amaxes;
#pragma unroll 1
  for (int first = 0; first < panel_rows(kGrid); first += kAmaxRows) {
    AmaxElements x;
    masters_of.read(first, x);
    amaxes.rows(place, first, x);
  }
  amaxes.finish(place);
}

}  // namespace

void partial_amax(const Format& format, Dtype nominal, Dtype master, DeviceBases masters, const Work& work, Array packed,
                  Stream stream) {
  for_storage(master, [&](auto storage) {
    for_grid(format, [&](auto grid) {
      launch(amax_kernel<decltype(storage), decltype(grid)::value>, work.blocks, kAmaxShape.threads(), stream, format,
             table_of(work), items_of(work), bases_of(masters), AmaxSink{amaxes_of(packed), nominal});
    });
  });
}

}  // namespace zerocast::cuda
