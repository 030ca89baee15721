// How the work of a stage is cut: which elements a warp or a thread block takes, and how many blocks a weight needs.
//
// Shared by the host, which counts blocks once a table, and the kernels, which find their place again from an ordinal.
#pragma once

#include <cstdint>

#include "descriptor.h"
#include "scale_buffer.h"

namespace zerocast::cuda {

// Kinds of work, each with a way of its own to count thread blocks.
enum class Stage : int { kAmaxPanels, kCastPanels, kScales, kTranspose, kTransposeScales };

constexpr int kWarpLanes = 32;

// A warp takes a panel of 16 rows, or of the rows of a columnwise block if those are more, and a lane some neighbouring columns
// of each row. The warps of a thread block are stacked, so that 8 of them hold a block of 128 rows in whole.
struct PanelShape {
  int lane_columns, warps;
  ZC_HD constexpr int width() const { return kWarpLanes * lane_columns; }
  ZC_HD constexpr int threads() const { return kWarpLanes * warps; }
};
// Reading alone is best done 16 bytes of f32 a lane; codes of 8 elements make one store of 4 or 8 bytes.
constexpr PanelShape kAmaxShape{4, 8}, kCastShape{8, 4};
constexpr int kPanelRows = 16;

// adam_step: elements of a segment that a thread block takes.
constexpr int kSegmentElements = 4096;

// Scales: a thread takes 4 neighbouring entries of 4 rows of a scale buffer, or of the rows that repeat one.
constexpr int kScaleEntries = 4, kScaleThreads = 256;

// Transposes: a thread block turns 128 bytes of 128 rows of 8-bit codes, or of 256 rows of 4-bit codes.
constexpr int kTurnBytes = 128, kTurnThreads = 256;

// The panels of a weight. Formats without blocks see their span as rows of one panel's width, wherever the weight's own end.
struct PanelGrid {
  int64_t origin;  // the element that row 0 starts with; of a span without blocks it may lie before the span
  int64_t pitch;   // elements from row to row
  int64_t rows, columns;
  int64_t first_row;  // of the first thread block
  uint32_t across;    // thread blocks side by side
  int64_t blocks;
};

ZC_HD int panel_rows(const Format& format) {
  return format.columnwise_block.rows > kPanelRows ? static_cast<int>(format.columnwise_block.rows) : kPanelRows;
}

ZC_HD PanelGrid panel_grid(const Format& format, const Weight& w, PanelShape shape) {
  const int64_t height = panel_rows(format) * shape.warps, width = shape.width();
  const bool empty = w.stop() == w.start();
  if (!format.block && !format.columnwise_block) {
    const int64_t origin = w.start() / kCastShape.lane_columns * kCastShape.lane_columns;
    return {origin, width, INT64_MAX / width, width, 0, 1, empty ? 0 : (w.stop() - origin - 1) / (height * width) + 1};
  }
  const int64_t columns = w.columns(), across = (columns - 1) / width + 1;
  const int64_t first = w.start() / columns / height, last = empty ? first - 1 : (w.stop() - 1) / columns / height;
  return {0, columns, w.rows(), columns, first * height, static_cast<uint32_t>(across), (last - first + 1) * across};
}

// Threads that fill one scale buffer; in 32 bits, as are its rows and columns: 64-bit divisions would cost more than the rest.
ZC_HD uint32_t scale_threads_across(const ScaleBuffer& buffer) {
  return (static_cast<uint32_t>(buffer.columns) + kScaleEntries - 1) / kScaleEntries;
}

ZC_HD uint32_t scale_rows(const ScaleBuffer& buffer) { return buffer.repeat == 1 ? 4 : 1; }  // of the grid, a thread

ZC_HD uint32_t scale_threads(const ScaleBuffer& buffer) {
  const uint32_t grid_rows = static_cast<uint32_t>(buffer.rows) / static_cast<uint32_t>(buffer.repeat);
  return (grid_rows + scale_rows(buffer) - 1) / scale_rows(buffer) * scale_threads_across(buffer);
}

ZC_HD uint32_t own_scale_threads(const Format& format, const Weight& w) {
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
    case Stage::kAmaxPanels:
      return panel_grid(format, w, kAmaxShape).blocks;
    case Stage::kCastPanels:
      return panel_grid(format, w, kCastShape).blocks;
    case Stage::kScales:
      return blocks(static_cast<int64_t>(scale_threads(rowwise_scale_buffer(format, w.rows(), w.columns()))) +
                        own_scale_threads(format, w),
                    kScaleThreads);
    case Stage::kTranspose:
      return turn_grid(format, w).across * turn_grid(format, w).down;
    case Stage::kTransposeScales:
      return format.block ? blocks(scale_threads(columnwise_scale_buffer(format, w.rows(), w.columns())), kScaleThreads) : 0;
  }
  return 0;
}

}  // namespace zerocast::cuda
