#include "cpu/panels.h"

namespace zerocast {

namespace {

constexpr int64_t kLeastElements = 64 * 1024;
constexpr int64_t kMostElements = 1024 * 1024;

int64_t widest_panel(const Table& table, const PanelLimits& limits) {
  int64_t owned = 0;
  for (int64_t i = 0; i < table.size; ++i) owned += table[i][column::NUMEL];
  const int64_t elements = std::clamp(owned / (8 * limits.threads), kLeastElements, kMostElements);
  return std::clamp(elements / limits.row_step / kColumnStep * kColumnStep, kColumnStep, limits.most_columns);
}

}  // namespace

std::vector<Panel> owned_panels(const Format& format, const Table& table, const PanelLimits& limits) {
  const int64_t widest = widest_panel(table, limits), row_step = limits.row_step;
  std::vector<Panel> panels;
  for (int64_t i = 0; i < table.size; ++i) {
    const Weight weight = table[i];
    if (weight[column::NUMEL] == 0) continue;
    const int64_t pitch = format.block || limits.pitch == Pitch::kRow ? weight.columns() : kFlatColumns;
    const int64_t width = std::min(pitch, widest);
    const int64_t height = round_up(std::max<int64_t>(1, kLeastElements / width), row_step);
    const int64_t end_row = (weight.stop() - 1) / pitch + 1;
    for (int64_t row = weight.start() / pitch / row_step * row_step; row < end_row; row += height) {
      const int64_t last_row = std::min(end_row, row + height);
      for (int64_t column = 0; column < pitch; column += width) {
        panels.push_back({weight, pitch, row, last_row, column, std::min(pitch, column + width)});
      }
    }
  }
  return panels;
}

}  // namespace zerocast
