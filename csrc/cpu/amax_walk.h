// Walks the owned elements of a table for their amaxes, with an action on each row just before.
//
// Each row is folded into the running maxima of its block row, which stay in the cache. Maxima are
// computed on the master's own bits and rounded to nominal once a block, as rounding is monotone.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "cpu/master.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"

namespace zerocast {

// The loops of partial_amax.inc for the dtypes of a master, its nominal dtype and the packed
// buffer.
struct AmaxLoops {
  bool (*fold)(const void* source, int64_t blocks, int64_t width, int32_t* maxima);
  bool (*fold_both)(const void* source, int64_t blocks, int32_t* maxima, int32_t* columns);
  void (*fold_line)(const int32_t* columns, int64_t n, int64_t width, int32_t* maxima);
  void (*store)(const int32_t* maxima, void* packed, int64_t n);
};
using AmaxLoopsOf = AmaxLoops (*)(Dtype master, Dtype nominal, Dtype packed);

// Notes, where the table has a place for it, that a master of a weight is not finite. Several threads
// may write the same value.
inline void note_not_finite(const Weight& weight, Array packed) {
  const int64_t index = weight[column::NOT_FINITE];
  if (index < 0) return;
  const uintptr_t at = packed.address + index * size_of(packed.dtype);
  if (packed.dtype == Dtype::kBfloat16) {
    __atomic_store_n(reinterpret_cast<uint16_t*>(at), Bfloat16::narrow(1.0f), __ATOMIC_RELAXED);
  } else {
    __atomic_store_n(reinterpret_cast<uint32_t*>(at), Float32::narrow(1.0f), __ATOMIC_RELAXED);
  }
}

// A grid of blocks over a panel, with the running maxima of a band of rows that are stored
// together. A band is a block row, or several rows if blocks are one row high, whose amaxes are
// contiguous. There is one maximum for each block if blocks are wide enough to be reduced row by
// row, else one for each column, reduced to blocks at the end of the band.
class GridMaxima {
 public:
  GridMaxima(const AmaxLoops& loops, const Panel& panel, Block block, Array packed, int64_t first_amax)
      : loops_(loops),
        panel_(panel),
        block_(block),
        width_(block.rows > 1 && block.columns < 64 ? 1 : block.columns),
        band_rows_(block.rows == 1 && panel.columns() == panel.pitch ? std::min(block.columns, kBandRows) : block.rows),
        row_stride_(block.rows == 1 ? blocks(width_) : 0),
        packed_(packed),
        first_amax_(first_amax) {}

  void enter(int64_t row) {
    if (row < next_band_) return;
    band_ = row;
    next_band_ = std::min(panel_.last_row, (row / band_rows_ + 1) * band_rows_);
    std::fill_n(maxima_.data(), row_stride_ ? (next_band_ - row) * row_stride_ : blocks(width_), -1);
  }

  // Folds the owned columns of a row: partial blocks at either end, whole blocks between. True if
  // all elements are finite.
  bool add(int64_t row, const Master& master, Panel::Segment owned) {
    bool finite = true;
    for (int64_t c = owned.first; c < owned.last;) {
      const int64_t whole = c % width_ ? 0 : (owned.last - c) / width_;
      const int64_t n = whole ? whole * width_ : std::min(owned.last, c / width_ * width_ + width_) - c;
      finite &= loops_.fold(master.at(row * panel_.pitch + c), whole ? whole : 1, whole ? width_ : n, at(row, c));
      c += n;
    }
    return finite;
  }

  void leave(int64_t row) const {
    if (row + 1 < next_band_) return;
    if (width_ == block_.columns) return store(maxima_.data());
    std::array<int32_t, kPanelColumns> maxima;
    loops_.fold_line(maxima_.data(), panel_.columns(), block_.columns, maxima.data());
    store(maxima.data());
  }

  // The maximum for a column of a row of the band.
  int32_t* at(int64_t row, int64_t column) {
    return maxima_.data() + (row - band_) * row_stride_ + (column - panel_.first_column) / width_;
  }

 private:
  static constexpr int64_t kBandRows = 32;

  int64_t blocks(int64_t width) const { return (panel_.columns() - 1) / width + 1; }

  void store(const int32_t* maxima) const {
    const int64_t across = (panel_.pitch - 1) / block_.columns + 1;
    const int64_t index = first_amax_ + band_ / block_.rows * across + panel_.first_column / block_.columns;
    const int64_t n = blocks(block_.columns) * (row_stride_ ? next_band_ - band_ : 1);
    loops_.store(maxima, reinterpret_cast<void*>(packed_.address + index * size_of(packed_.dtype)), n);
  }

  const AmaxLoops& loops_;
  const Panel& panel_;
  const Block block_;
  const int64_t width_;
  const int64_t band_rows_;
  const int64_t row_stride_;  // between the maxima of two rows; 0 if the rows of a band share them
  const Array packed_;
  const int64_t first_amax_;
  int64_t band_ = 0, next_band_ = 0;
  alignas(64) std::array<int32_t, kPanelColumns> maxima_;
};

template <class Before>
void one_grid(const Format& format, const AmaxLoops& loops, const Panel& panel, const Master& master, Array packed,
              const Before& before) {
  GridMaxima grid(loops, panel, format.block, packed, panel.weight[column::ROW_AMAX]);
  bool finite = true;
  for (int64_t row = panel.first_row; row < panel.last_row; ++row) {
    grid.enter(row);
    const Panel::Segment owned = panel.owned(row);
    before(panel, row, owned);
    finite &= grid.add(row, master, owned);
    grid.leave(row);
  }
  if (!finite) note_not_finite(panel.weight, packed);
}

// Rows of 1x32 blocks and 32x1 columns, both from one read of each element.
template <class Before>
void two_grids(const Format& format, const AmaxLoops& loops, const Panel& panel, const Master& master, Array packed,
               const Before& before) {
  GridMaxima rows(loops, panel, format.block, packed, panel.weight[column::ROW_AMAX]);
  GridMaxima columns(loops, panel, format.columnwise_block, packed, panel.weight[column::COLUMN_AMAX]);
  bool finite = true;
  for (int64_t row = panel.first_row; row < panel.last_row; ++row) {
    rows.enter(row);
    columns.enter(row);
    const Panel::Segment owned = panel.owned(row);
    before(panel, row, owned);
    const int64_t first = std::min(round_up(owned.first, 32), owned.last);
    const int64_t last = std::max(first, owned.last / 32 * 32);
    for (const Panel::Segment part : {Panel::Segment{owned.first, first}, Panel::Segment{last, owned.last}}) {
      if (part.first >= part.last) continue;
      finite &= rows.add(row, master, part);
      columns.add(row, master, part);
    }
    if (first < last) {
      finite &= loops.fold_both(master.at(row * panel.pitch + first), (last - first) / 32, rows.at(row, first),
                                columns.at(row, first));
    }
    rows.leave(row);
    columns.leave(row);
  }
  if (!finite) note_not_finite(panel.weight, packed);
}

template <class Before>
int32_t panel_maximum(const AmaxLoops& loops, const Panel& panel, const Master& master, Array packed, const Before& before) {
  int32_t maximum = -1;
  bool finite = true;
  for (int64_t row = panel.first_row; row < panel.last_row; ++row) {
    const Panel::Segment owned = panel.owned(row);
    if (owned.first >= owned.last) continue;
    before(panel, row, owned);
    finite &= loops.fold(master.at(row * panel.pitch + owned.first), 1, owned.last - owned.first, &maximum);
  }
  if (!finite) note_not_finite(panel.weight, packed);
  return maximum;
}

// Computes the partial amaxes of all owned elements. `before(panel, row, owned)` is called once for
// every row of every panel, by the thread that folds the row next; the calls cover each owned
// element once.
template <class Before>
void walk_amaxes(const Format& format, Dtype nominal, const std::vector<Array>& masters, const Table& table, Array packed,
                 int threads, AmaxLoopsOf amax_loops, const Before& before, Pitch pitch = Pitch::kFlat) {
  const int64_t row_step = std::max<int64_t>({1, format.block.rows, format.columnwise_block.rows});
  const std::vector<Panel> panels = owned_panels(format, table, {row_step, kPanelColumns, threads, pitch});
  std::vector<int32_t> maxima(format.block ? 0 : panels.size());
  const auto loops_of = [&](const Master& master) { return amax_loops(master.dtype, nominal, packed.dtype); };
  parallel_for(static_cast<int64_t>(panels.size()), threads, [&](int64_t i) {
    const Panel& panel = panels[i];
    const Master master(masters, panel.weight);
    const AmaxLoops loops = loops_of(master);
    if (!format.block) {
      maxima[i] = panel_maximum(loops, panel, master, packed, before);
    } else if (format.columnwise == Columnwise::kOwnGrid) {
      two_grids(format, loops, panel, master, packed, before);
    } else {
      one_grid(format, loops, panel, master, packed, before);
    }
  });
  // Without blocks the panels of a weight, which follow each other, share one amax.
  for (size_t i = 0; i < maxima.size(); ++i) {
    if (i + 1 < maxima.size() && panels[i + 1].weight.row == panels[i].weight.row) {
      maxima[i + 1] = std::max(maxima[i], maxima[i + 1]);
      continue;
    }
    const Weight weight = panels[i].weight;
    const uintptr_t slot = packed.address + weight[column::ROW_AMAX] * size_of(packed.dtype);
    loops_of(Master(masters, weight)).store(&maxima[i], reinterpret_cast<void*>(slot), 1);
  }
}

}  // namespace zerocast
