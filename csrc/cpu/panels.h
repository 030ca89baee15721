// Splits the owned elements of many weights into tasks, called panels.
//
// A panel is some full rows of one weight, of which the span owns all or a part. A weight's panels
// are between its first and last owned row, so the work follows the spans. Rows are read
// completely, since memory is fast only for consecutive pages; only very long rows are split.
// Columns do not matter to a format without blocks, so its weights may be read as matrices of
// kFlatColumns columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "descriptor.h"

namespace zerocast {

constexpr int64_t kFlatColumns = 4096;
constexpr int64_t kPanelColumns = 16 * 1024;  // a multiple of kColumnStep, as is the width of every panel that is cut
constexpr int64_t kColumnStep = 1024;

struct Panel {
  Weight weight;
  int64_t pitch;  // elements from row to row
  int64_t first_row, last_row;
  int64_t first_column, last_column;

  // The owned columns of a row; none if last <= first.
  struct Segment {
    int64_t first, last;
  };
  Segment owned(int64_t row) const {
    const int64_t origin = row * pitch;
    return {std::max(weight.start() - origin, first_column), std::min(weight.stop() - origin, last_column)};
  }
  int64_t columns() const { return last_column - first_column; }
};

// The rows of the panels of a format without blocks: of kFlatColumns elements, or those of the weight.
enum class Pitch { kFlat, kRow };

struct PanelLimits {
  int64_t row_step;  // first rows are multiples of it
  int64_t most_columns;
  int threads;  // each should find work
  Pitch pitch = Pitch::kFlat;
};

std::vector<Panel> owned_panels(const Format& format, const Table& table, const PanelLimits& limits);

}  // namespace zerocast
