// Stage adam_8bit_cast: the update of adam_8bit over whole rows of blocks, the amaxes of the updated
// masters, and their codes, from one read.
#include "cuda/moment_pieces.cuh"
#include "cuda/one_pass.cuh"

namespace zerocast::cuda {
namespace {

constexpr int kMinBlocks = 3;  // a multiprocessor: 80 registers a thread, and 66 KB of shared memory a thread block
constexpr int kStages = 3;     // of WarpRing: two took 1 % longer, and four 11
constexpr int kRows = one_pass_rows(kWarps);
static_assert(kOnePass8bitShape.threads() == kThreads && kOnePass8bitShape.lane_columns == kOnePassColumns &&
              kRows == kPanelRows);

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

  __device__ OnePassLane lane_of_thread() const {
    const int thread = static_cast<int>(threadIdx.x);
    return lane.at(thread / kWarpLanes * kRows, thread % kWarpLanes * kOnePassColumns);
  }
};

template <class Grad, class Nominal, class E, Grid kGrid>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    adam_8bit_cast_kernel(Format format, const int64_t* table, const MomentPiece* pieces, const Item* items,
                          PieceBases bases, AdamInputs adam, const int64_t* steps, AmaxSink out, BaseList row_data) {
  __shared__ CodeValues values;
  __shared__ Tile tile;
  KeptRows<Nominal> rows;
  {
    // Loads that do not need each other are in flight at once.
    const CodeValuesOfThread values_of_thread;
    const bool skips = holds(adam.skip);
    const Item item = items[blockIdx.x];
    const MomentPiece piece = pieces[item.weight];
    const CutLargest no_cuts{};
    const PieceStep<Grad> step(bases, no_cuts, piece, adam, steps, values);
    const Weight w = weight_of(table, item);
    const OnePassLane lane = one_pass_lane<kGrid, kWarps>(format, w, item);
    Tile first{lane, w, origin_of<Float32>(bases.master, w), data_of(row_data, w)};
    // Without this the compiler loads what only one thread needs behind the branch, where it waits for each.
    asm volatile("" : "+l"(first.master), "+l"(first.data));
    if (threadIdx.x == 0) tile = first;
    values_of_thread.store(values);
    if (skips) return;
    update_panel<kRows, kStages>(step, {lane, w, out}, rows);
    note_poison(w, out, rows.poison());
  }
  const OnePassLane lane = tile.lane_of_thread();
  const LaneAmaxes amaxes = amaxes_of_lanes<kGrid, kWarps>(rows.most());
  const float multiplier = multiplier_of<kGrid>(format, round_to<Nominal>(amaxes.block), round_to<Nominal>(amaxes.group));
  store_amax<kGrid, kWarps>(lane, tile.weight, out, amaxes.block);
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
