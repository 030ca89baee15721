// Stage compute_scales: whole scale buffers, padding included, and the tensor amaxes, from the
// reduced amaxes.
//
// It has two loops: tensor amaxes, which two-level scales need first, then bands of buffer rows of
// all weights.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "codec.h"
#include "cpu/parallel.h"
#include "cpu/scale_groups.h"
#include "cpu/simd.h"
#include "cpu/stages.h"
#include "scale_buffer.h"

namespace zerocast {
namespace {

struct ScaleLoops {
  float (*grid_amax)(Dtype dtype, const void* packed, int64_t n);
  void (*load_amaxes)(Dtype dtype, const void* packed, float* amaxes, int64_t n);
  void (*stored_scales)(const Format& format, float tensor_amax, const float* amaxes, const float* groups, void* out,
                        int64_t n);
};

}  // namespace
}  // namespace zerocast

#define ZC_LOOPS "compute_scales.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {
namespace {

constexpr int64_t kBandBytes = 64 * 1024;
constexpr int64_t kChunk = 1024;

// Some rows of one scale buffer and their amaxes; `rows` is a multiple of the buffer's repeat.
struct Band {
  ScaleBuffer buffer;
  Weight weight;
  uintptr_t amaxes, out;
  int64_t first_row, last_row;
};

struct Stage {
  const Format& format;
  const ScaleLoops loops;
  const Array packed;
  const Bases& amaxes;
  const Bases& scales;

  uintptr_t packed_at(int64_t index) const { return packed.address + index * size_of(packed.dtype); }
  float* amax(const Weight& w) const {
    return reinterpret_cast<float*>(amaxes[w[column::AMAX_BASE]]) + w[column::AMAX_OFFSET];
  }
  float delayed(const Weight& w) const {
    return reinterpret_cast<const float*>(scales[w[column::SCALE_BASE]])[w[column::SCALE_OFFSET]];
  }

  void tensor_amax(const Weight& w) const {
    const GridShape grid = grid_shape(format.block, w.rows(), w.columns());
    const auto* first = reinterpret_cast<const void*>(packed_at(w[column::ROW_AMAX]));
    float most = loops.grid_amax(packed.dtype, first, grid.down * grid.across);
    if (format.scale_rule == ScaleRule::kTwoLevel && w[column::SHARED_AMAX] >= 0) {
      const auto* shared = reinterpret_cast<const void*>(packed_at(w[column::SHARED_AMAX]));
      most = std::max(most, loops.grid_amax(packed.dtype, shared, 1));
    }
    *amax(w) = format.stored_amax(most);
  }

  // Computes the stored scales of consecutive blocks of a weight.
  void stored(const Band& band, int64_t first, int64_t n, uint8_t* out) const {
    if (format.amax_policy == AmaxPolicy::kDelayed) {
      const float scale_inv = 1.0f / delayed(band.weight);
      std::memcpy(out, &scale_inv, sizeof scale_inv);
      return;
    }
    const float tensor = format.scale_rule == ScaleRule::kTwoLevel ? *amax(band.weight) : 0.0f;
    alignas(64) std::array<float, kChunk> amaxes, groups;
    const GridShape& grid = band.buffer.grid;
    for (int64_t i = 0, m = 0; i < n; i += m) {
      m = std::min(kChunk, n - i);
      if (format.scale_group) {  // row by row
        const int64_t row = (first + i) / grid.across, column = (first + i) % grid.across;
        m = std::min(m, grid.across - column);
        group_amaxes(format, {{band.amaxes, packed.dtype}, 0, grid, loops.load_amaxes}, row, column, m, groups.data());
      }
      const auto* source = reinterpret_cast<const void*>(band.amaxes + (first + i) * size_of(packed.dtype));
      loops.load_amaxes(packed.dtype, source, amaxes.data(), m);
      loops.stored_scales(format, tensor, amaxes.data(), groups.data(), out + i * band.buffer.entry, m);
    }
  }

  // Computes all blocks of the band at once, then copies them row by row as often as they repeat.
  void fill(const Band& band) const {
    const ScaleBuffer& buffer = band.buffer;
    const int64_t across = buffer.grid.across, used = buffer.used_columns();
    const int64_t first = band.first_row / buffer.repeat;
    const int64_t last = std::max(first, std::min(band.last_row, buffer.used_rows()) / buffer.repeat);
    std::vector<uint8_t> scales((last - first) * across * buffer.entry);
    stored(band, first * across, (last - first) * across, scales.data());
    auto* line = reinterpret_cast<uint8_t*>(band.out) + band.first_row * buffer.row_bytes();
    for (int64_t row = first * buffer.repeat; row < last * buffer.repeat; ++row, line += buffer.row_bytes()) {
      const uint8_t* source = scales.data() + (row / buffer.repeat - first) * across * buffer.entry;
      if (buffer.repeat_columns == 1) {
        std::memcpy(line, source, across * buffer.entry);
      } else {  // only scales of one byte repeat over columns
        for (int64_t i = 0; i < across; ++i) std::memset(line + i * buffer.repeat_columns, source[i], buffer.repeat_columns);
      }
      if (used < buffer.columns) buffer.pad(line + used * buffer.entry, buffer.columns - used);
    }
    buffer.pad(line, (band.last_row - std::max(band.first_row, last * buffer.repeat)) * buffer.columns);
  }
};

void add_bands(std::vector<Band>& bands, const ScaleBuffer& buffer, const Weight& weight, uintptr_t amaxes, uintptr_t out) {
  const int64_t height = round_up(std::max<int64_t>(1, kBandBytes / buffer.row_bytes()), buffer.repeat);
  for (int64_t row = 0; row < buffer.rows; row += height) {
    bands.push_back({buffer, weight, amaxes, out, row, std::min(buffer.rows, row + height)});
  }
}

}  // namespace

void compute_scales(const Format& format, Array packed, const Table& table, const Bases& row_scales,
                    const Bases& column_scales, const Bases& amaxes, const Bases& scales, int threads) {
  const Stage stage{format, ZC_AT_LEVEL(scale_loops)(), packed, amaxes, scales};
  if (format.has_tensor_amax()) {
    const int useful = format.block ? threads : 1;  // without blocks there is one amax to copy
    parallel_for(table.size, useful, [&](int64_t i) { stage.tensor_amax(table[i]); });
  }
  std::vector<Band> bands;
  for (int64_t i = 0; i < table.size; ++i) {
    const Weight w = table[i];
    const ScaleBuffer buffer = rowwise_scale_buffer(format, w.rows(), w.columns());
    const uintptr_t out = row_scales[w[column::ROW_SCALE_BASE]] + w[column::ROW_SCALE_OFFSET] * buffer.entry;
    add_bands(bands, buffer, w, stage.packed_at(w[column::ROW_AMAX]), out);
    if (format.columnwise != Columnwise::kOwnGrid && format.columnwise != Columnwise::kShared) continue;
    const ScaleBuffer own = columnwise_scale_buffer(format, w.rows(), w.columns());
    const uintptr_t own_out = column_scales[w[column::COLUMN_SCALE_BASE]] + w[column::COLUMN_SCALE_OFFSET] * own.entry;
    const bool shared = format.columnwise == Columnwise::kShared;
    add_bands(bands, own, w, stage.packed_at(w[shared ? column::ROW_AMAX : column::COLUMN_AMAX]), own_out);
  }
  int64_t bytes = 0;
  for (const Band& band : bands) bytes += (band.last_row - band.first_row) * band.buffer.row_bytes();
  const int useful = bytes > kBandBytes ? threads : 1;
  parallel_for(static_cast<int64_t>(bands.size()), useful, [&](int64_t i) { stage.fill(bands[i]); });
}

}  // namespace zerocast::cpu
