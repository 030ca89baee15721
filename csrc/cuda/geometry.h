// The division of a stage's work: the elements of a warp or a thread block, and the blocks of a
// weight.
//
// It is shared by the host, which counts blocks once a table, and the kernels, which compute their
// position from an ordinal.
#pragma once

#include <cstdint>

#include "descriptor.h"
#include "scale_buffer.h"

namespace zerocast::cuda {

// Kinds of work; each counts its thread blocks in its own way.
enum class Stage : int { kAmaxPanels, kCastPanels, kOnePass, kOnePass8bit, kScales, kTranspose, kTransposeScales };

constexpr int kWarpLanes = 32;

// A warp takes a panel of 16 rows, or of 32 if blocks have 32 columns; a lane takes some neighbouring
// columns of each row. The warps of a thread block are stacked, so that 8
// of them cover a block of 128 rows.
struct PanelShape {
  int lane_columns, warps;
  int cluster = 1;  // thread blocks side by side that divide their panels among them
  ZC_HD constexpr int width() const { return kWarpLanes * lane_columns; }
  ZC_HD constexpr int threads() const { return kWarpLanes * warps; }
};
// Reads are fastest at 16 bytes of f32 a lane; the codes of 8 elements make one store of 4 or 8
// bytes.
constexpr PanelShape kAmaxShape{4, 8}, kCastShape{8, 4};
constexpr int kPanelRows = 16;
// Adam and cast in one pass: a thread block takes 128 x 128 elements, a warp some whole rows of them.
// Moments in 8 bits take more registers, so their thread blocks have fewer warps. They work in pairs, so
// that what they read and write at one time lies together.
constexpr PanelShape kOnePassShape{4, 16}, kOnePass8bitShape{4, 8, 2};
ZC_HD constexpr int one_pass_rows(int warps) { return 128 / warps; }

// adam_8bit: groups of a piece that a thread block takes.
constexpr int kMomentGroups = 128;

// Scales: a thread takes 16 neighbouring bytes of 8 rows of a scale buffer, or of the rows that
// repeat one.
constexpr int kScaleBytes = 16, kScaleRows = 8, kScaleThreads = 256;

// Transposes: a thread block takes 128 bytes of 256 rows. Its threads, 8 across, take 16 bytes of 4
// rows each, or of 8 rows of 4-bit codes.
constexpr int kTransposeBytes = 128, kTransposeRows = 256, kTransposeThreads = 256;

// The panels of a weight. A format without blocks treats its span as rows of one panel's width.
struct PanelGrid {
  int64_t origin;  // first element of row 0, which may lie before a span without blocks
  int64_t pitch;   // elements from row to row
  int64_t rows, columns;
  uint32_t across;  // thread blocks side by side, in whole clusters: the last may have no elements
};

ZC_HD int panel_rows(const Format& format) { return format.block.columns == 2 * kPanelRows ? 2 * kPanelRows : kPanelRows; }

ZC_HD PanelGrid panel_grid(const Format& format, const Weight& w, PanelShape shape) {
  const int64_t width = shape.width();
  if (!format.block && !format.columnwise_block) {
    const int64_t origin = w.start() / kCastShape.lane_columns * kCastShape.lane_columns;
    return {origin, width, INT64_MAX / width, width, 1};
  }
  const uint32_t cluster = shape.cluster, clusters = static_cast<uint32_t>((w.columns() - 1) / (width * cluster) + 1);
  return {0, w.columns(), w.rows(), w.columns(), clusters * cluster};
}

// Ordinals of the thread blocks of a weight, counted from its first row, wherever the span begins.
struct Ordinals {
  int64_t first, count;
};

inline Ordinals panel_ordinals(const Format& format, const Weight& w, PanelShape shape, int panel_rows) {
  if (w.stop() == w.start()) return {0, 0};
  const PanelGrid grid = panel_grid(format, w, shape);
  const int64_t height = panel_rows * shape.warps;
  const int64_t first = (w.start() - grid.origin) / grid.pitch / height,
                last = (w.stop() - 1 - grid.origin) / grid.pitch / height;
  return {first * grid.across, (last - first + 1) * grid.across};
}

// The threads that fill one scale buffer. All extents are 32-bit: 64-bit divisions would cost more
// than the rest of the kernel.
ZC_HD uint32_t scale_threads_across(const ScaleBuffer& buffer) {
  return (static_cast<uint32_t>(buffer.row_bytes()) + kScaleBytes - 1) / kScaleBytes;
}

ZC_HD uint32_t scale_rows(const ScaleBuffer& buffer) {
  return buffer.repeat == 1 ? kScaleRows : 1;
}  // rows of the grid per thread

ZC_HD uint32_t scale_threads(const ScaleBuffer& buffer) {
  const uint32_t grid_rows = static_cast<uint32_t>(buffer.rows) / static_cast<uint32_t>(buffer.repeat);
  return (grid_rows + scale_rows(buffer) - 1) / scale_rows(buffer) * scale_threads_across(buffer);
}

// The rowwise scale buffer as compute_scales fills it: as one row if it has no padding.
ZC_HD ScaleBuffer filled_scale_buffer(const Format& format, const Weight& w) {
  const ScaleBuffer buffer = rowwise_scale_buffer(format, w.rows(), w.columns());
  const int64_t scales = buffer.rows * buffer.columns;
  return format.scale_rule == ScaleRule::kBF16 ? ScaleBuffer{{1, scales}, 1, 1, 1, scales, buffer.entry} : buffer;
}

// compute_scales fills the columnwise buffer too, unless that is the transposed rowwise one.
ZC_HD uint32_t own_scale_threads(const Format& format, const Weight& w) {
  return format.columnwise == Columnwise::kOwnGrid || format.columnwise == Columnwise::kShared
             ? scale_threads(columnwise_scale_buffer(format, w.rows(), w.columns()))
             : 0;
}

// The pieces in which one weight is transposed, across and down.
struct TransposeGrid {
  int64_t across, down;
};

ZC_HD TransposeGrid transpose_grid(const Format& format, const Weight& w) {
  const int64_t bytes = w.columns() / format.elements_per_byte();
  return {(bytes + kTransposeBytes - 1) / kTransposeBytes, (w.rows() + kTransposeRows - 1) / kTransposeRows};
}

inline Ordinals ordinals(Stage stage, const Format& format, const Weight& w) {
  const auto blocks = [](int64_t threads) { return Ordinals{0, (threads + kScaleThreads - 1) / kScaleThreads}; };
  switch (stage) {
    case Stage::kAmaxPanels:
      return panel_ordinals(format, w, kAmaxShape, panel_rows(format));
    case Stage::kCastPanels:
      return panel_ordinals(format, w, kCastShape, panel_rows(format));
    case Stage::kOnePass:
      return panel_ordinals(format, w, kOnePassShape, one_pass_rows(kOnePassShape.warps));
    case Stage::kOnePass8bit:
      return panel_ordinals(format, w, kOnePass8bitShape, one_pass_rows(kOnePass8bitShape.warps));
    case Stage::kScales:
      return blocks(static_cast<int64_t>(scale_threads(filled_scale_buffer(format, w))) + own_scale_threads(format, w));
    case Stage::kTranspose:
      return {0, transpose_grid(format, w).across * transpose_grid(format, w).down};
    case Stage::kTransposeScales:
      return blocks(format.block ? scale_threads(columnwise_scale_buffer(format, w.rows(), w.columns())) : 0);
  }
  return {0, 0};
}

}  // namespace zerocast::cuda
