// Stage adam_8bit_cast: the update of adam_8bit over whole rows of blocks, the amaxes of the updated
// masters, and their codes, from one read.
#include "cuda/cluster.cuh"
#include "cuda/moment_pieces.cuh"
#include "cuda/one_pass.cuh"

namespace zerocast::cuda {
namespace {

// A multiprocessor: 80 registers a thread, and less than 196 KB of shared memory, which L1 would lack.
constexpr int kMinBlocks = 3;
constexpr int kStages = 3;  // of WarpRing: two took 1 % longer, and four 11
constexpr int kRows = one_pass_rows(kWarps);
static_assert(kOnePass8bitShape.threads() == kThreads && kOnePass8bitShape.lane_columns == kOnePassColumns &&
              kRows == kPanelRows);

#if __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

// How a pair of thread blocks divides two tiles of 128 x 128 side by side. Each takes half of the rows of
// both, so that what it reads and writes at one time lies together: on an H200 the kernel then takes 1.066
// (fp8_block) or 1.070 (mxfp8) times as long as a copy, and with a tile for each thread block 1.087 or
// 1.089. Four thread blocks with four tiles gain nothing more, and with mxfp4 they are slower.
//
// Where scales depend on all rows of a tile, the pair is a cluster. Before sm_90, which has none, each
// thread block takes a tile there.
template <Grid kGrid, class E>
struct TilePair {
  static constexpr bool kNeedsTile = kGrid == Grid::kSquare128 || E::kBits == 4;  // E2M1 may have scale groups
  static constexpr int kPair = kOnePass8bitShape.cluster, kCluster = kNeedsTile && kHasClusters ? kPair : 1;
  // The tiles that a thread block has rows of, and its warps in each.
  static constexpr int kTiles = kNeedsTile && !kHasClusters ? 1 : kPair, kTall = kWarps / kTiles;
  static_assert(kPair == 2);

  // The lane of a thread block's first thread. Work lists have whole pairs.
  __device__ static OnePassLane first_lane(const Format& format, const Weight& w, const Item& item) {
    const PanelGrid grid = panel_grid(known<kGrid>(format), w, kOnePass8bitShape);
    const uint32_t band = item.ordinal / grid.across, across = item.ordinal - band * grid.across, part = across % kTiles;
    return lane_at<kOnePassColumns>(grid, w, int64_t{band} * 128 + part * (kTall * kRows), int64_t{across - part} * 128);
  }
  // That of this thread. Warps lie side by side over the tiles, then below each other.
  __device__ static OnePassLane lane_of_thread(const OnePassLane& first) {
    const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
    return first.at(warp / kTiles * kRows, (warp % kTiles * kWarpLanes + lane) * kOnePassColumns);
  }
  // False where an odd number of tiles leaves this warp of the last pair without one.
  __device__ static bool has_tile(const OnePassLane& first) {
    return first.column + threadIdx.x / kWarpLanes % kTiles * 128 < first.columns;
  }
  // The amaxes of its blocks. That of a tile is over the cluster.
  __device__ static LaneAmaxes amaxes(const ClusterMaxima<kCluster, kTiles>& maxima, float most) {
    const int warp = threadIdx.x / kWarpLanes;
    const LaneAmaxes own = amaxes_of_lanes<kGrid, kRows, kTall, kTiles>(most);
    const float group = maxima.largest(warp % kTiles, own.group, warp < kTiles);
    return {kGrid == Grid::kSquare128 ? group : own.block, group};
  }
};

// Takes the rows of a lane as PanelAmaxes does, and keeps them for their codes.
template <class Nominal>
class KeptRows {
 public:
  static constexpr bool kTakesMost = true;

  __device__ void row(const AmaxPlace&, int r, const AmaxRow& x) {
    finite_rows(row_amax<kOnePassColumns>(x));
    finite_row(r, x);
    add_poison<kOnePassColumns>(x, poison_);
  }
  __device__ void finite_row(int r, const AmaxRow& x) { kept_.keep(r, x); }
  __device__ void finite_rows(float most) { most_ = fmaxf(most_, most); }
  __device__ float most() const { return most_; }
  __device__ float poison() const { return poison_; }

 private:
  Kept<Nominal, kWarps> kept_;
  float most_ = 0.0f, poison_ = 0.0f;
};

// What a thread block finds before its loops and needs behind them. There it is in shared memory, so
// that the loops have the registers.
struct Tile {
  OnePassLane lane;  // of the first thread
  Weight weight;
  uint64_t master, data;  // addresses of the weight's element 0
};

template <class Grad, class Nominal, class E, Grid kGrid>
__global__ void
#if __CUDA_ARCH__ >= 900
__cluster_dims__(TilePair<kGrid, E>::kCluster, 1, 1)
#endif
    __launch_bounds__(kThreads, kMinBlocks)
        adam_8bit_cast_kernel(Format format, const int64_t* table, const MomentPiece* pieces, const Item* items,
                              PieceBases bases, AdamInputs adam, const int64_t* steps, AmaxSink out, BaseList row_data) {
  using Pair = TilePair<kGrid, E>;
  __shared__ CodeValues values;
  __shared__ Tile tile;
  KeptRows<Nominal> rows;
  const ClusterMaxima<Pair::kCluster, Pair::kTiles> maxima;
  {
    // Loads that do not need each other are in flight at once.
    const CodeValuesOfThread values_of_thread;
    const bool skips = holds(adam.skip);
    const Item item = items[blockIdx.x];
    const MomentPiece piece = pieces[item.weight];
    const CutLargest no_cuts{};
    const PieceStep<Grad> step(bases, no_cuts, piece, adam, steps, values);
    const Weight w = weight_of(table, item);
    const OnePassLane first_lane = Pair::first_lane(format, w, item), lane = Pair::lane_of_thread(first_lane);
    Tile first{first_lane, w, origin_of<Float32>(bases.master, w), data_of(row_data, w)};
    // Without this the compiler loads what only one thread needs behind the branch, where it waits for each.
    asm volatile("" : "+l"(first.master), "+l"(first.data));
    if (threadIdx.x == 0) tile = first;
    if (skips) return;
    maxima.begin();
    values_of_thread.store(values);
    maxima.begun();
    if (Pair::has_tile(first_lane)) update_panel<kRows, kStages>(step, {lane, w, out}, rows);
    note_poison(w, out, rows.poison());
  }
  const OnePassLane lane = Pair::lane_of_thread(tile.lane);
  const LaneAmaxes amaxes = Pair::amaxes(maxima, rows.most());
  const float multiplier = multiplier_of<kGrid>(format, round_to<Nominal>(amaxes.block), round_to<Nominal>(amaxes.group));
  store_amax<kGrid, kRows>(lane, static_cast<int>(lane.row / kRows), tile.weight, out, amaxes.block);
  write_codes<Nominal, E, kWarps>(lane, tile.master, tile.data, multiplier);
}

}  // namespace

void adam_8bit_cast(const Format& format, Dtype nominal, const Adam8bitState& state, const Work& work, uintptr_t pieces,
                    const AdamStep& step, uintptr_t steps, Array packed, DeviceBases row_data, Stream stream) {
  for_grad(state.grads.dtype, [&](auto grad) {
    for_nominal(nominal, [&](auto rounded) {
      for_codes(format, [&](auto element, auto grid) {
        using Grad = decltype(grad);
        using Nominal = decltype(rounded);
        const auto kernel = adam_8bit_cast_kernel<Grad, Nominal, decltype(element), decltype(grid)::value>;
        launch_with_shared_memory(WarpRing<Grad, kStages>::kBytes, kernel, work.blocks, kThreads, stream, format,
                                  table_of(work), reinterpret_cast<const MomentPiece*>(pieces), items_of(work),
                                  piece_bases(state), inputs_of(step), reinterpret_cast<const int64_t*>(steps),
                                  AmaxSink{amaxes_of(packed), nominal}, bases_of(row_data));
      });
    });
  });
}

}  // namespace zerocast::cuda
