// Stage choose_scales: the scale of every block whose elements are all owned, by the error that each
// of its two scales leaves. A block that chooses the code 4 for its amax gets the minus there.
#include <array>
#include <stdexcept>
#include <vector>

#include "codec.h"
#include "cpu/master.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stages.h"

namespace zerocast {
namespace {

constexpr int64_t kBlock = 16;  // rows and columns
using RowErrors = void (*)(const void* source, const MapError& four, const MapError& six, float* sums);

}  // namespace
}  // namespace zerocast

#define ZC_LOOPS "choose_scales.inc"
#include "cpu/at_every_level.h"

namespace zerocast::cpu {
namespace {

// The amaxes of one weight in the packed buffer.
struct Amaxes {
  Array packed;
  int64_t first;

  float load(int64_t i) const {
    if (packed.dtype == Dtype::kBfloat16) return Bfloat16::widen(at<uint16_t>(i));
    return at<float>(i);
  }
  void store(int64_t i, float amax) const {
    if (packed.dtype == Dtype::kBfloat16)
      at<uint16_t>(i) = Bfloat16::narrow_number(amax);
    else
      at<float>(i) = amax;
  }

 private:
  template <class Word>
  Word& at(int64_t i) const {
    return reinterpret_cast<Word*>(packed.address)[first + i];
  }
};

struct RowOfBlocks {
  Weight weight;
  int64_t row;  // of blocks
  float tensor_amax;
};

// Adds the sums of rows 8, 4, 2 and 1 apart.
float sum_of_rows(const std::array<std::array<float, 2>, kBlock>& rows, int map) {
  std::array<float, kBlock> sums;
  for (int64_t r = 0; r < kBlock; ++r) sums[r] = rows[r][map];
  for (int64_t apart = kBlock / 2; apart > 0; apart /= 2) {
    for (int64_t r = 0; r < apart; ++r) sums[r] += sums[r + apart];
  }
  return sums[0];
}

void choose(const Format& format, const RowOfBlocks& task, const Master& master, RowErrors errors, const Amaxes& amaxes) {
  const FourOverSixScale scale(task.tensor_amax, format.top());
  const bool squares = format.four_over_six == FourOverSix::kMse;
  const int64_t pitch = task.weight.columns(), across = pitch / kBlock;
  for (int64_t j = 0; j < across; ++j) {
    const int64_t first = task.row * kBlock * pitch + j * kBlock;
    if (first < task.weight.start() || first + (kBlock - 1) * pitch + kBlock > task.weight.stop()) continue;
    const int64_t index = task.row * across + j;
    const float amax = float_of(bits_of(amaxes.load(index)) & kMagnitude);
    const MapError four(scale, -amax, task.tensor_amax, format.top(), squares);
    const MapError six(scale, amax, task.tensor_amax, format.top(), squares);
    std::array<std::array<float, 2>, kBlock> rows;
    for (int64_t r = 0; r < kBlock; ++r) errors(master.at(first + r * pitch), four, six, rows[r].data());
    amaxes.store(index, sum_of_rows(rows, 0) < sum_of_rows(rows, 1) ? -amax : amax);
  }
}

}  // namespace

void choose_scales(const Format& format, Dtype nominal, const std::vector<Array>& masters, const Table& table, Array packed,
                   int threads) {
  if (format.block.rows != kBlock || format.block.columns != kBlock) {
    throw std::invalid_argument("scales are chosen for blocks of 16 x 16");
  }
  std::vector<RowOfBlocks> tasks;
  for (int64_t i = 0; i < table.size; ++i) {
    const Weight w = table[i];
    if (w.stop() == w.start()) continue;
    const Amaxes amaxes{packed, w[column::ROW_AMAX]};
    const GridShape grid = grid_shape(format.block, w.rows(), w.columns());
    int32_t most = 0;
    for (int64_t j = 0; j < grid.down * grid.across; ++j) most = larger(most, bits_of(amaxes.load(j)) & kMagnitude);
    const int64_t unit = kBlock * w.columns();
    for (int64_t row = w.start() / unit; row * unit < w.stop(); ++row) tasks.push_back({w, row, float_of(most)});
  }
  parallel_for(static_cast<int64_t>(tasks.size()), threads, [&](int64_t i) {
    const Weight& w = tasks[i].weight;
    const Master master(masters, w);
    choose(format, tasks[i], master, ZC_AT_LEVEL(row_errors_of)(master.dtype, nominal), {packed, w[column::ROW_AMAX]});
  });
}

}  // namespace zerocast::cpu
