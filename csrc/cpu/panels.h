// How the owned elements of many weights are cut into tasks.
//
// A panel is some rows of one weight, as long as they are, of which the span owns all or a part. Work follows the spans: a
// weight's panels are those between its first and last owned row. Rows are walked whole, because memory is fast only where a
// page follows the page before; only very long rows are cut. A format without blocks has no columns that matter: its weights
// are read as matrices of kFlatColumns columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "descriptor.h"

namespace zerocast {

constexpr int64_t kFlatColumns = 4096;
constexpr int64_t kPanelColumns =
    16 * 1024;  // the most; a multiple of kColumnStep, as is the width of every panel that is cut
constexpr int64_t kColumnStep = 1024;

struct Panel {
  Weight weight;
  int64_t pitch;  // elements from row to row
  int64_t first_row, last_row;
  int64_t first_column, last_column;

  // The owned columns of a row; none where last <= first.
  struct Segment {
    int64_t first, last;
  };
  Segment owned(int64_t row) const {
    const int64_t origin = row * pitch;
    return {std::max(weight.start() - origin, first_column), std::min(weight.stop() - origin, last_column)};
  }
  int64_t columns() const { return last_column - first_column; }
};

struct PanelLimits {
  int64_t row_step;  // first rows are multiples of it
  int64_t most_columns;
  int threads;  // that should all find work
};

std::vector<Panel> owned_panels(const Format& format, const Table& table, const PanelLimits& limits);

}  // namespace zerocast
