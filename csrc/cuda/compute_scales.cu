// Stage compute_scales: whole scale buffers, padding included, and the tensor amaxes, from the
// reduced amaxes.
//
// A thread fills 16 bytes of a row in all the rows that repeat them. Two-level scales need the tensor
// amax first.
#include "cuda/dispatch.cuh"
#include "cuda/scale_entries.cuh"
#include "cuda/stages.h"
#include "cuda/tensor_amax.cuh"

namespace zerocast::cuda {
namespace {

struct ScaleOutputs {
  BaseList row_scales, column_scales, amaxes, scales;
  const float* partial;
};

// The tensor amax; all lanes of a warp call it together.
__device__ float tensor_amax(const Format& format, const Weight& w, int64_t index, const Amaxes& packed,
                             const ScaleOutputs& out) {
  if (format.scale_rule == ScaleRule::kTwoLevel) {
    return format.stored_amax(tensor_amax_of(out.partial, index));
  }
  return format.has_tensor_amax() ? packed.load(w[column::ROW_AMAX]) : 0.0f;
}

// The stored scale of a block: the bits of an f32 or a bf16, or a byte.
template <ScaleRule kGivenRule>
struct StoredScale {
  static constexpr ScaleRule kRule = kGivenRule;
  const Format& format;
  TwoLevel two_level;

  __device__ uint32_t of(float amax) const {
    if constexpr (kRule == ScaleRule::kE8M0) return format.power_of_two_scale().code(amax);
    if constexpr (kRule == ScaleRule::kTwoLevel) return two_level.stored(amax);
    if constexpr (kRule == ScaleRule::kBF16) return bf16_scale(amax);
    return bits_of(1.0f / fp32_scale(amax, format.fp8_max(), format.amax_epsilon, format.power_of_2_scale));
  }
};

constexpr int kFour = 4;  // amaxes that are read together

// Four neighbouring amaxes, of which `count` exist.
template <class Packed>
__device__ void read_amaxes(const Amaxes& packed, int64_t index, uint32_t count, float (&amaxes)[kFour]) {
  const auto* at = static_cast<const typename Packed::Word*>(packed.address) + index;
  if (count >= kFour && reinterpret_cast<uint64_t>(at) % Four<Packed>::kBytes == 0) {
    const Four<Packed> four = Four<Packed>::load(at);
#pragma unroll
    for (int c = 0; c < kFour; ++c) amaxes[c] = four[c];
  } else {
#pragma unroll
    for (int c = 0; c < kFour; ++c) amaxes[c] = c < count ? Packed::widen(at[c]) : 0.0f;
  }
}

// The largest amax of the group of 4 x 4 blocks that `row` of the grid has four of, `count` of them
// existing, from `column` on.
template <class Packed>
__device__ float group_amax(const Amaxes& packed, int64_t first_amax, const GridShape& grid, uint32_t row, uint32_t column,
                            uint32_t count) {
  float most = 0.0f;
#pragma unroll
  for (uint32_t r = 0; r < kFour; ++r) {
    const uint32_t down = row / kFour * kFour + r;
    float amaxes[kFour];
    read_amaxes<Packed>(packed, first_amax + static_cast<int64_t>(down) * grid.across + column,
                        down < grid.down ? count : 0u, amaxes);
#pragma unroll
    for (int c = 0; c < kFour; ++c) most = fmaxf(most, amaxes[c]);
  }
  return most;
}

// Sixteen bytes of some rows of a buffer, including padding. Where columns are repeated (kRepeated),
// they are of one block. The code for scales that depend on each other (kGrouped) would slow down all
// others: it takes many registers.
template <class Packed, bool kGrouped, bool kRepeated, class Stored>
__device__ void fill(const ScaleBuffer& buffer, uint32_t thread, int64_t first_amax, const Amaxes& packed,
                     const Stored& scale, uint8_t* out) {
  constexpr ScaleRule kRule = Stored::kRule;
  constexpr uint32_t kEntry = kRule == ScaleRule::kFP32 ? 4 : kRule == ScaleRule::kBF16 ? 2 : 1;
  constexpr uint32_t kPadding = kRule == ScaleRule::kFP32 ? 0x3F800000u : 0u;
  const uint32_t across = scale_threads_across(buffer), rows = scale_rows(buffer), row_bytes = buffer.row_bytes();
  const uint32_t tall = thread / across, first_byte = (thread - tall * across) * kScaleBytes, column = first_byte / kEntry;
  const uint32_t grid_rows = static_cast<uint32_t>(buffer.rows) / static_cast<uint32_t>(buffer.repeat);
  const uint32_t used = buffer.used_columns(), there = used > column ? used - column : 0u;
#pragma unroll(kRepeated ? 8 : 2)
  for (uint32_t i = 0; i < rows; ++i) {
    const uint32_t down = tall * rows + i;
    if (down >= grid_rows) return;
    const uint32_t count = down < buffer.grid.down ? there : 0u;
    const int64_t grid_row = first_amax + static_cast<int64_t>(down) * buffer.grid.across;
    ScaleWords words;
    if constexpr (kRepeated) {
      const uint32_t block = column / static_cast<uint32_t>(buffer.repeat_columns);
      const uint32_t entry = count ? scale.of(packed.load(grid_row + block)) : kPadding;
#pragma unroll
      for (uint32_t& word : words) word = entry * 0x01010101u;
    } else {
#pragma unroll
      for (int four = 0; four < kScaleBytes / (kFour * static_cast<int>(kEntry)); ++four) {
        const uint32_t first = column + four * kFour, exist = count > four * kFour ? count - four * kFour : 0u;
        float amaxes[kFour];
        read_amaxes<Packed>(packed, grid_row + first, exist, amaxes);
        uint32_t entries[kFour];
#pragma unroll
        for (int c = 0; c < kFour; ++c) entries[c] = c < exist ? scale.of(amaxes[c]) : kPadding;
        if constexpr (kGrouped) {
          if (exist) {
            const float most = group_amax<Packed>(packed, first_amax, buffer.grid, down, first, exist);
            const PowerOfTwoScale power = scale.format.power_of_two_scale();
#pragma unroll
            for (int c = 0; c < kFour; ++c) {
              if (c < exist) entries[c] = power.code(amaxes[c], most);
            }
          }
        }
        if constexpr (kEntry == 1) {
          words[four] = word_of(entries);
        } else if constexpr (kEntry == 2) {
          words[2 * four] = word_of(entries[0], entries[1]);
          words[2 * four + 1] = word_of(entries[2], entries[3]);
        } else {
#pragma unroll
          for (int c = 0; c < kFour; ++c) words[c] = entries[c];
        }
      }
    }
    uint8_t* row = out + static_cast<int64_t>(down) * buffer.repeat * row_bytes;
    for (int r = 0; r < buffer.repeat; ++r, row += row_bytes) write_words(row, first_byte, row_bytes, words);
  }
}

template <class Packed, Grid kGrid, bool kGrouped>
__global__ void __launch_bounds__(kScaleThreads)
    scale_kernel(Format given, const int64_t* table, const Item* items, Amaxes packed, ScaleOutputs out, const bool* skip) {
  if (holds(skip)) return;
  constexpr ScaleRule kRule = rule_of(kGrid);
  Format format = known<kGrid>(given);
  format.scale_rule = kRule;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const uint32_t thread = item.ordinal * kScaleThreads + threadIdx.x;
  const float amax = tensor_amax(format, w, item.weight, packed, out);
  if (thread == 0 && format.has_tensor_amax()) *out.amaxes.at<float>(w, column::AMAX_BASE, column::AMAX_OFFSET) = amax;
  const auto at = [&](const BaseList& bases, column::Column base, column::Column offset, int64_t entry) {
    return reinterpret_cast<uint8_t*>(bases.addresses[w[base]] + w[offset] * entry);
  };
  const ScaleBuffer buffer = filled_scale_buffer(format, w);
  const StoredScale<kRule> scale{format, format.two_level(amax)};
  const uint32_t rowwise = scale_threads(buffer), columnwise = own_scale_threads(format, w);
  if (format.amax_policy == AmaxPolicy::kDelayed) {
    if (thread == 0) {
      auto* scale_inv = reinterpret_cast<float*>(at(out.row_scales, column::ROW_SCALE_BASE, column::ROW_SCALE_OFFSET, 4));
      *scale_inv = 1.0f / *out.scales.at<const float>(w, column::SCALE_BASE, column::SCALE_OFFSET);
    }
  } else if (thread < rowwise) {
    fill<Packed, kGrouped, false>(buffer, thread, w[column::ROW_AMAX], packed, scale,
                                  at(out.row_scales, column::ROW_SCALE_BASE, column::ROW_SCALE_OFFSET, buffer.entry));
  } else if (thread < rowwise + columnwise) {
    const column::Column amaxes = format.columnwise == Columnwise::kShared ? column::ROW_AMAX : column::COLUMN_AMAX;
    fill<Packed, kGrouped, kGrid == Grid::kSquare32>(
        columnwise_scale_buffer(format, w.rows(), w.columns()), thread - rowwise, w[amaxes], packed, scale,
        at(out.column_scales, column::COLUMN_SCALE_BASE, column::COLUMN_SCALE_OFFSET, 1));
  }
}

}  // namespace

void compute_scales(const Format& format, Array packed, const Work& work, DeviceBases row_scales, DeviceBases column_scales,
                    DeviceBases amaxes, DeviceBases scales, uintptr_t partial, Flag skip, Stream stream) {
  const ScaleOutputs out{bases_of(row_scales), bases_of(column_scales), bases_of(amaxes), bases_of(scales),
                         reinterpret_cast<const float*>(partial)};
  if (format.scale_rule == ScaleRule::kTwoLevel) launch_partial_maxima(format, packed, work, partial, stream);
  for_grid(format, [&](auto grid) {
    constexpr Grid kGrid = decltype(grid)::value;
    if (format.scale_rule != rule_of(kGrid)) {
      throw std::invalid_argument("the CUDA kernels have no such scales for these blocks");
    }
    const auto start = [&](auto grouped) {
      constexpr bool kGrouped = decltype(grouped)::value;
      const auto kernel = packed.dtype == Dtype::kBfloat16 ? scale_kernel<Bfloat16, kGrid, kGrouped>
                                                           : scale_kernel<Float32, kGrid, kGrouped>;
      launch(kernel, work.blocks, kScaleThreads, stream, format, table_of(work), items_of(work), amaxes_of(packed), out,
             flag_of(skip));
    };
    if constexpr (kGrid == Grid::kSquare32) {
      if (format.scale_group) return start(std::true_type{});
    }
    start(std::false_type{});
  });
}

}  // namespace zerocast::cuda
