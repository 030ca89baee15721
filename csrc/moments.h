// Moments in 8 bits (docs/formats/moments_8bit.md), for host and device: the values of codes, scales,
// random numbers, and the pieces of weights, which are rows of the class Piece of
// zerocast/backends/descriptor.py.
#pragma once

#include <cstdint>

#include "codec.h"
#include "descriptor.h"

namespace zerocast {

// The values of codes in units of the scale: of m by the bits of a code, of v by codes. The value
// behind the last code is one that no element reaches.
struct CodeValues {
  float first[256];
  float second[257];
};

constexpr double fourth_power(double x) { return x * x * (x * x); }

constexpr CodeValues code_values() {
  CodeValues values{};
  for (int c = 0; c < 128; ++c) values.first[c] = static_cast<float>(c) / static_cast<float>(254 - c);
  for (int c = 1; c < 128; ++c) values.first[256 - c] = -values.first[c];
  values.first[128] = 2.0f;
  for (int c = 1; c < 256; ++c) values.second[c] = static_cast<float>(fourth_power(c + 4) / fourth_power(259));
  values.second[256] = 2.0f;
  return values;
}

constexpr float kSmallestScale = 0x1p-100f;

ZC_HD float group_scale(float largest) {
  const float finite = largest < kFloatMax ? largest : kFloatMax;
  return largest > 0.0f ? (finite > kSmallestScale ? finite : kSmallestScale) : 0.0f;
}

ZC_HD uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return x ^ x >> 16;
}

// A word whose upper 16 bits are the complement of those of mix(x).
ZC_HD uint32_t mix_complement(uint32_t x) {
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  return (x ^ x >> 13) * (0u - 0xC2B2AE35u) - 1u;
}

// The key of a weight's random numbers in one step.
ZC_HD uint32_t key_of_step(int64_t key, int64_t step) {
  return mix(static_cast<uint32_t>(key) + static_cast<uint32_t>(step) * 0x9E3779B9u);
}

// The seed that the random numbers of 2**32 elements of a weight share.
ZC_HD uint32_t seed_of(uint32_t key, int64_t element) { return mix(key + static_cast<uint32_t>(element >> 32)); }

// The upper 24 bits are a random number.
ZC_HD uint32_t random_bits(uint32_t key, int64_t element) {
  return mix(seed_of(key, element) + static_cast<uint32_t>(element));
}

struct MomentPiece {
  int64_t base, offset, numel, scalars, start, columns, scale, second_scale, cut_first, cut_last, key;

  static constexpr int64_t kWidth = 11;
  static constexpr int64_t kGroup = 128;

  ZC_HD int64_t groups_across() const { return (columns - 1) / kGroup + 1; }
  // True if no row ends within a group.
  ZC_HD bool whole_groups() const { return columns % kGroup == 0; }
  // The number of an element's group, counted over the rows. Divisions of 64 bits, which take a GPU as
  // long as an element, are left to weights with shorter groups.
  ZC_HD int64_t group_of(int64_t element) const {
    if (whole_groups()) return element / kGroup;
    return element / columns * groups_across() + element % columns / kGroup;
  }
  ZC_HD int64_t groups() const { return group_of(start + numel - 1) - group_of(start) + 1; }

  // The place of a group, counted from the first one of the piece, among cut groups, or -1.
  ZC_HD int64_t cut(int64_t group, int64_t groups) const {
    return group == 0 && cut_first >= 0 ? cut_first : group == groups - 1 ? cut_last : -1;
  }
};
static_assert(sizeof(MomentPiece) == MomentPiece::kWidth * sizeof(int64_t));

// Walks over groups of a piece, from one on that is counted from its first.
class MomentGroups {
 public:
  ZC_HD MomentGroups(const MomentPiece& piece, int64_t group)
      : start_(piece.start), stop_(piece.start + piece.numel), columns_(piece.columns) {
    const int64_t number = piece.group_of(piece.start) + group;
    if (piece.whole_groups()) {
      columns_ = INT64_MAX;
      column_ = element_ = number * kGroup;
      return;
    }
    const int64_t row = number / piece.groups_across();
    column_ = (number - row * piece.groups_across()) * kGroup;
    element_ = row * columns_ + column_;
  }

  ZC_HD void advance() {
    column_ += kGroup;
    element_ += kGroup;
    if (column_ < columns_) return;
    element_ -= column_ - columns_;
    column_ = 0;
  }

  // The index in the whole weight of the group's first element, which the piece need not have.
  ZC_HD int64_t element() const { return element_; }
  // The elements of the group that the piece has, counted from that one: [first, last).
  ZC_HD int first() const { return start_ > element_ ? static_cast<int>(start_ - element_) : 0; }
  ZC_HD int last() const {
    const int64_t in_row = columns_ - column_, in_piece = stop_ - element_, most = in_row < in_piece ? in_row : in_piece;
    return static_cast<int>(most < kGroup ? most : kGroup);
  }

 private:
  static constexpr int64_t kGroup = MomentPiece::kGroup;
  int64_t start_, stop_, columns_, column_, element_;
};

// The largest values of groups that several ranks have parts of: of first moments, then of second ones.
struct CutLargest {
  float* values;
  int64_t count;
};

}  // namespace zerocast
