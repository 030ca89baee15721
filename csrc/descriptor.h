// The arguments of a stage: the descriptor table, one row a weight, and the format as plain data.
//
// The columns are those of zerocast/backends/descriptor.py, the fields those of FormatSpec;
// zerocast/backends/extension.py refuses an extension whose columns differ. A base is an address;
// the *_BASE columns index lists of bases.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "codec.h"
#include "platform.h"

namespace zerocast {

// clang-format off
#define ZC_COLUMNS(X) \
  X(ROWS) X(COLUMNS) X(START) X(NUMEL) \
  X(MASTER_BASE) X(MASTER_OFFSET) X(ROW_AMAX) X(COLUMN_AMAX) \
  X(ROW_DATA_BASE) X(ROW_DATA_OFFSET) X(COLUMN_DATA_BASE) X(COLUMN_DATA_OFFSET) \
  X(ROW_SCALE_BASE) X(ROW_SCALE_OFFSET) X(COLUMN_SCALE_BASE) X(COLUMN_SCALE_OFFSET) \
  X(AMAX_BASE) X(AMAX_OFFSET) X(SCALE_BASE) X(SCALE_OFFSET) X(HISTORY_BASE) X(HISTORY_OFFSET) \
  X(NOT_FINITE)
// clang-format on

namespace column {
#define ZC_COLUMN(name) name,
enum Column { ZC_COLUMNS(ZC_COLUMN) WIDTH };
#undef ZC_COLUMN
// Two-level scales have no columnwise grid: the place in the packed buffer of a tensor amax that
// is reduced by itself, or -1.
constexpr Column SHARED_AMAX = COLUMN_AMAX;
}  // namespace column

// One row of the table.
struct Weight {
  const int64_t* row;
  ZC_HD int64_t operator[](column::Column c) const { return row[c]; }
  ZC_HD int64_t rows() const { return row[column::ROWS]; }
  ZC_HD int64_t columns() const { return row[column::COLUMNS]; }
  ZC_HD int64_t start() const { return row[column::START]; }
  ZC_HD int64_t stop() const { return row[column::START] + row[column::NUMEL]; }
};

struct Table {
  const int64_t* rows;
  int64_t size;
  ZC_HD Weight operator[](int64_t i) const { return {rows + i * column::WIDTH}; }
};

enum class Dtype : int { kFloat32, kBfloat16, kFloat16 };
enum class Element : int { kNominal, kE4M3, kE5M2, kE2M1, kInt4 };
enum class ScaleRule : int { kNone, kFP32, kE8M0, kTwoLevel, kBF16 };
enum class Columnwise : int { kNone, kTranspose, kOwnGrid, kShared };
enum class AmaxPolicy : int { kNone, kCurrent, kDelayed };

ZC_HD int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// The extent of a block; {0, 0} is the whole tensor, or for a columnwise block, none.
struct Block {
  int64_t rows, columns;
  ZC_HD explicit operator bool() const { return rows != 0; }
};

// The number of blocks, down and across.
struct GridShape {
  int64_t down, across;
};

ZC_HD int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

ZC_HD GridShape grid_shape(Block block, int64_t rows, int64_t columns) {
  if (!block) return {1, 1};
  return {(rows + block.rows - 1) / block.rows, (columns + block.columns - 1) / block.columns};
}

struct Format {
  Element element;
  ScaleRule scale_rule;
  Columnwise columnwise;
  AmaxPolicy amax_policy;
  Block block;
  Block columnwise_block;
  Block scale_group;  // the blocks whose E8M0 scales depend on each other
  bool scale_rounds_down;
  bool exact_scales;  // two-level scales whose products with every code are E4M3 numbers
  bool power_of_2_scale;
  bool most_recent;  // the algorithm that chooses an amax from the history; else the maximum
  float amax_epsilon;
  int margin;
  int64_t amax_history_len;

  ZC_HD bool has_tensor_amax() const {
    return scale_rule == ScaleRule::kTwoLevel || (amax_policy != AmaxPolicy::kNone && !block);
  }
  // The elements that the scale of a block depends on; of local scales.
  ZC_HD Block exchange_block() const { return scale_group ? scale_group : block; }
  bool casts_in_one_pass() const {
    const bool local = scale_rule == ScaleRule::kFP32 || scale_rule == ScaleRule::kE8M0;
    return local && amax_policy == AmaxPolicy::kCurrent && block && !columnwise_block;
  }
  ZC_HD int64_t elements_per_byte() const { return element == Element::kE2M1 || element == Element::kInt4 ? 2 : 1; }
  ZC_HD PowerOfTwoScale power_of_two_scale() const { return {element == Element::kE2M1, scale_rounds_down}; }
  ZC_HD TwoLevel two_level(float tensor_amax) const { return {tensor_amax, exact_scales}; }
  ZC_HD float stored_amax(float amax) const { return exact_scales ? exact_tensor_amax(amax) : amax; }
  ZC_HD float fp8_max() const { return element == Element::kE5M2 ? 57344.0f : 448.0f; }
};

// For stage adam_cast: throws unless scales depend on nothing but whole rows of blocks that are owned.
inline void check_whole_blocks(const Format& format, const Table& table) {
  if (!format.casts_in_one_pass()) {
    throw std::invalid_argument(
        "the scales of this format depend on more than their own blocks: adam_amax, then partial_cast");
  }
  for (int64_t i = 0; i < table.size; ++i) {
    const Weight w = table[i];
    const int64_t unit = format.exchange_block().rows * w.columns();
    if (w.start() == w.stop()) continue;
    if (w.start() % unit != 0 || (w.stop() % unit != 0 && w.stop() != w.rows() * w.columns())) {
      throw std::invalid_argument("row " + std::to_string(i) + ": elements " + std::to_string(w.start()) + " to " +
                                  std::to_string(w.stop()) + " of " + std::to_string(w.rows()) + "x" +
                                  std::to_string(w.columns()) + " cut a block");
    }
  }
}

// A tensor of a floating dtype.
struct Array {
  uintptr_t address;
  Dtype dtype;
};

using Bases = std::vector<uintptr_t>;

}  // namespace zerocast
