// Stage adam_8bit: AdamW on pieces of weights whose moments are kept in 8 bits, and the partial amaxes
// of the updated masters.
#include "cuda/moment_pieces.cuh"

namespace zerocast::cuda {
namespace {

constexpr int kMinBlocks = 3;  // a multiprocessor: 80 registers a thread, which hardly spill
constexpr int kStages = 4;     // of WarpRing: 40 KB of shared memory a thread block

// The groups of a warp, of a format without blocks: they follow each other.
template <class Grad, class Amaxes>
__device__ void update_run(const PieceStep<Grad>& step, uint32_t ordinal, const AmaxPlace& panel, Amaxes& amaxes) {
  const int64_t count = step.piece.groups(), begin = static_cast<int64_t>(ordinal) * kMomentGroups;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int64_t element = MomentGroups(step.piece, begin).element();
  if (step.template takes_whole<kMomentGroups>(element, MomentPiece::kGroup)) {
    return step.template whole_groups<kGroupsOfWarp, kStages>(begin + warp, element + warp * MomentPiece::kGroup,
                                                              TakingTurns{}, panel, 0, amaxes);
  }
  // The warps share fewer groups than a thread block may have.
  const int of_block = static_cast<int>(min(count - begin, int64_t{kMomentGroups})),
            of_warp = (of_block + kWarps - 1) / kWarps, before = warp * of_warp;
  const int64_t first = begin + before, last = begin + min(before + of_warp, of_block);
  if (first >= last) return;
  MomentGroups groups(step.piece, first);
#pragma unroll 1
  for (int64_t group = first; group < last; ++group, groups.advance()) {
    step.any_group(group, count, LanePlace(groups.element(), groups.first(), groups.last()), panel, 0, amaxes);
  }
}

template <Grid kGrid>
__device__ AmaxLane lane_of(const Format& format, const Weight& w, const Item& item) {
  if constexpr (kGrid == Grid::kTensor) return {};
  return find_lane<kLaneElements>(panel_grid(known<kGrid>(format), w, kAmaxShape), w, item.ordinal, panel_rows(kGrid),
                                  kWarps);
}

template <class Grad, Grid kGrid>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    adam_8bit_kernel(Format format, const int64_t* table, const MomentPiece* pieces, const Item* items, PieceBases bases,
                     AdamInputs adam, const int64_t* steps, AmaxSink out, CutLargest cuts) {
  __shared__ CodeValues values;
  PanelAmaxes<kGrid> amaxes;
  {
    // Loads that do not need each other are in flight at once, as a thread block is short.
    const CodeValuesOfThread values_of_thread;
    const bool skips = holds(adam.skip);
    const Item item = items[blockIdx.x];
    const MomentPiece piece = pieces[item.weight];
    const PieceStep<Grad> step(bases, cuts, piece, adam, steps, values);
    const Weight w = weight_of(table, item);
    const AmaxLane lane = lane_of<kGrid>(format, w, item);
    values_of_thread.store(values);
    if (skips) return;
    if constexpr (kGrid == Grid::kTensor) {
      update_run(step, item.ordinal, {lane, w, out}, amaxes);
    } else {
      update_panel<panel_rows(kGrid), kStages>(step, {lane, w, out}, amaxes);
    }
  }
  // Found once more, so that the loops above have these registers.
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const AmaxLane lane = lane_of<kGrid>(format, w, item);
  amaxes.finish({lane, w, out});
}

// The codes and scales of the groups at both ends of a piece, where they are cut: a warp each.
template <class Grad>
__global__ void __launch_bounds__(kThreads) adam_8bit_cut_kernel(PieceBases bases, const MomentPiece* pieces,
                                                                 AdamInputs adam, const int64_t* steps, CutLargest cuts) {
  if (holds(adam.skip)) return;
  __shared__ CodeValues values;
  const MomentPiece piece = pieces[blockIdx.x];
  if (max(piece.cut_first, piece.cut_last) < 0) return;
  CodeValuesOfThread().store(values);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int64_t count = piece.groups(), group = warp == 0 ? 0 : count - 1, cut = piece.cut(group, count);
  if (warp > 1 || (warp == 1 && count == 1) || cut < 0) return;
  const StepScalars s(adam.rows[piece.scalars], *adam.clip);
  const PieceArrays<Grad> arrays(bases, piece);
  const MomentGroups groups(piece, group);
  const LanePlace place(groups.element(), groups.first(), groups.last());
  const LanePointers<Grad> at = arrays.elements.at(place.element);
  const LaneMoments<Grad> moments(at.load(place), arrays.scales(group), s, values);
  const GroupPair scales = scales_of({cuts.values[cut], cuts.values[cuts.count + cut]});
  LaneResults results{};
  update_exactly(0xF, moments, scales, s, values, Randoms(key_of_step(piece.key, steps[piece.scalars]), place.element),
                 results);
  at.store_codes(results, place);
  arrays.store_scales(group, scales);
}

}  // namespace

void adam_8bit(const Format& format, Dtype nominal, const Adam8bitState& state, const Work& work, const Work& pieces,
               const AdamStep& step, uintptr_t numbers, Array packed, const CutLargest& cuts, bool finishes, Stream stream) {
  const auto* rows = reinterpret_cast<const MomentPiece*>(pieces.table);
  const auto* steps = reinterpret_cast<const int64_t*>(numbers);
  const PieceBases bases = piece_bases(state);
  const Work& groups = format.block || format.columnwise_block ? work : pieces;
  for_grad(state.grads.dtype, [&](auto grad) {
    using Grad = decltype(grad);
    if (finishes) {
      return launch(adam_8bit_cut_kernel<Grad>, pieces.weights, kThreads, stream, bases, rows, inputs_of(step), steps, cuts);
    }
    for_grid(format, [&](auto grid) {
      launch_with_shared_memory(WarpRing<Grad, kStages>::kBytes, adam_8bit_kernel<Grad, decltype(grid)::value>,
                                groups.blocks, kThreads, stream, format, table_of(work), rows, items_of(groups), bases,
                                inputs_of(step), steps, AmaxSink{amaxes_of(packed), nominal}, cuts);
    });
  });
}

}  // namespace zerocast::cuda
