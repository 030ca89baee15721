// Pieces of weights whose moments are kept in 8 bits, as the class Piece of
// zerocast/backends/descriptor.py describes them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "descriptor.h"

namespace zerocast {

struct MomentPiece {
  int64_t offset, numel, scalars, start, columns, scale, cut_first, cut_last, key;

  static constexpr int64_t kWidth = 9;
  static constexpr int64_t kGroup = 128;

  int64_t groups_across() const { return (columns - 1) / kGroup + 1; }
  int64_t group_of(int64_t element) const { return element / columns * groups_across() + element % columns / kGroup; }
  int64_t groups() const { return group_of(start + numel - 1) - group_of(start) + 1; }

  // The elements, as indices in the whole weight, of a group, counted from the first one of the piece.
  std::pair<int64_t, int64_t> elements(int64_t group) const {
    const int64_t number = group_of(start) + group, row = number / groups_across(), across = number % groups_across();
    const int64_t first = row * columns + across * kGroup;
    const int64_t last = row * columns + std::min(columns, (across + 1) * kGroup);
    return {std::max(first, start), std::min(last, start + numel)};
  }
};
static_assert(sizeof(MomentPiece) == MomentPiece::kWidth * sizeof(int64_t));

// Flat tensors that are updated together. Both tensors of floats have a row for each moment.
struct Adam8bitState {
  float* master;
  Array grad;
  int8_t* exp_avg;
  uint8_t* exp_avg_sq;
  float* scales;
  int64_t scale_count;
  float* cut_largest;
  int64_t cut_count;
};

}  // namespace zerocast
