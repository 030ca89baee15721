// How the work of a stage is cut: which elements a warp or a thread block takes, and how many blocks a weight needs.
//
// Shared by the host, which counts blocks once a table, and the kernels, which find their place again from an ordinal.
#pragma once

#include <cstdint>

#include "descriptor.h"
#include "scale_buffer.h"

namespace zerocast::cuda {

enum class Stage : int { kPanels, kScales, kTranspose, kTransposeScales, kWeights };

// A warp takes a panel of 16 rows by 256 columns: a lane 8 columns of each row, which are 16 or 32 bytes of master and one
// aligned store of codes. Blocks of 16 columns are then two lanes, blocks of 128 half a warp.
constexpr int kPanelRows = 16, kLaneColumns = 8, kWarpLanes = 32;
constexpr int kPanelColumns = kWarpLanes * kLaneColumns;
constexpr int kPanelWarps = 4;  // of a thread block
constexpr int kPanelThreads = kPanelWarps * kWarpLanes;

// adam_step: elements of a segment that a thread block takes.
constexpr int kSegmentElements = 4096;

// Scales: a thread takes 4 neighbouring entries of a scale buffer, in all the rows that repeat them.
constexpr int kScaleEntries = 4, kScaleThreads = 256;

// Transposes: a thread block turns 128 bytes of 128 rows of 8-bit codes, or of 256 rows of 4-bit codes.
constexpr int kTurnBytes = 128, kTurnThreads = 256;

struct PanelGrid {
  bool flat;        // no blocks: rows of 256 elements of the span, wherever the weight's own rows end
  int64_t origin;   // flat: the element that the first row starts with; may lie before the span
  int64_t pitch;    // elements from row to row
  int64_t rows;     // of the matrix
  int64_t columns;  // of the matrix
  int64_t first_row;
  uint32_t across;  // panels side by side
  uint32_t count;
};

// Rows of a panel: 16, or the 32 of a column block of mxfp8, which one lane then holds in whole.
ZC_HD int64_t panel_rows(const Format& format) {
  return format.columnwise_block.rows > kPanelRows ? format.columnwise_block.rows : kPanelRows;
}

ZC_HD PanelGrid panel_grid(const Format& format, const Weight& w) {
  const int64_t height = panel_rows(format);
  if (!format.block && !format.columnwise_block) {
    const int64_t origin = w.start() / kLaneColumns * kLaneColumns;
    const int64_t panel = height * kPanelColumns;
    const int64_t count = (w.stop() - origin + panel - 1) / panel;
    return {true,
            origin,
            kPanelColumns,
            INT64_MAX,
            kPanelColumns,
            0,
            1,
            static_cast<uint32_t>(w.stop() > w.start() ? count : 0)};
  }
  const int64_t columns = w.columns(), across = (columns + kPanelColumns - 1) / kPanelColumns;
  if (w.stop() == w.start()) return {false, 0, columns, w.rows(), columns, 0, static_cast<uint32_t>(across), 0};
  const int64_t first = w.start() / columns / height, last = (w.stop() - 1) / columns / height;
  return {false,
          0,
          columns,
          w.rows(),
          columns,
          first * height,
          static_cast<uint32_t>(across),
          static_cast<uint32_t>((last - first + 1) * across)};
}

// Threads that fill one scale buffer.
ZC_HD int64_t scale_threads(const ScaleBuffer& buffer) {
  return buffer.rows / buffer.repeat * ((buffer.columns + kScaleEntries - 1) / kScaleEntries);
}

ZC_HD int64_t own_scale_threads(const Format& format, const Weight& w) {
  return format.columnwise == Columnwise::kOwnGrid ? scale_threads(columnwise_scale_buffer(format, w.rows(), w.columns()))
                                                   : 0;
}

// Squares of codes of one weight, across and down.
struct TurnGrid {
  int64_t byte_columns, codes_down;  // of a square
  int64_t across, down;
};

ZC_HD TurnGrid turn_grid(const Format& format, const Weight& w) {
  const int64_t per_byte = format.elements_per_byte(), codes_down = kTurnBytes * per_byte;
  return {kTurnBytes, codes_down, (w.columns() / per_byte + kTurnBytes - 1) / kTurnBytes,
          (w.rows() + codes_down - 1) / codes_down};
}

// Thread blocks that a stage needs for one weight.
inline int64_t block_count(Stage stage, const Format& format, const Weight& w) {
  const auto blocks = [](int64_t threads, int64_t size) { return (threads + size - 1) / size; };
  switch (stage) {
    case Stage::kPanels:
      return blocks(panel_grid(format, w).count, kPanelWarps);
    case Stage::kScales:
      return blocks(scale_threads(rowwise_scale_buffer(format, w.rows(), w.columns())) + own_scale_threads(format, w),
                    kScaleThreads);
    case Stage::kTranspose:
      return turn_grid(format, w).across * turn_grid(format, w).down;
    case Stage::kTransposeScales:
      return format.block ? blocks(scale_threads(columnwise_scale_buffer(format, w.rows(), w.columns())), kScaleThreads) : 0;
    case Stage::kWeights:
      return 1;
  }
  return 0;
}

}  // namespace zerocast::cuda
