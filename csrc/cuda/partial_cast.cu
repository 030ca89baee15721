// Stage partial_cast: the codes of the owned elements, from one read of them.
#include "cuda/codes.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {
namespace {

struct CastInputs {
  Format format;
  BaseList masters;
  Amaxes packed;
  BaseList amaxes, scales;
  BaseList row_data, column_data;
  const bool* skip;
};

constexpr int kColumns = kCastShape.lane_columns;
constexpr int kStep = 8;  // rows whose loads are in flight together

using CastLane = Lane<kColumns>;
using CastRow = Row<kColumns>;

// The destination of a lane's codes; `origin` is the address of the weight's element 0.
template <class E>
class CodeWriter {
 public:
  using Word = typename Codes8<E>::Word;

  __device__ CodeWriter(const CastLane& lane, uint64_t origin, int height)
      : lane_(lane),
        origin_(origin),
        whole_(lane.whole(height) && address(0, 0) % sizeof(Word) == 0 && lane.pitch * E::kBits / 8 % sizeof(Word) == 0) {}

  __device__ void write(int r, Word codes) const {
    if (whole_) {
      *reinterpret_cast<Word*>(address(r, 0)) = codes;
    } else {
      write_owned(r, codes);
    }
  }

 private:
  __device__ uint64_t address(int r, int c) const { return origin_ + (lane_.element + r * lane_.pitch + c) * E::kBits / 8; }

  // A byte with one owned code keeps its other half; both halves belong to one lane.
  __device__ void write_owned(int r, Word codes) const {
    constexpr int kInByte = 8 / E::kBits;
    const CastLane::Owned owned = lane_.owned(r);
    uint64_t all = 0;
    memcpy(&all, &codes, sizeof codes);
#pragma unroll 1
    for (int c = owned.first / kInByte * kInByte; c < owned.last; c += kInByte) {
      const auto code = static_cast<uint8_t>(all >> c * E::kBits);
      auto* const byte = reinterpret_cast<uint8_t*>(address(r, c));
      if (owned.has(c) && owned.has(c + kInByte - 1)) {
        *byte = code;
      } else {
        const uint8_t mask = owned.has(c) ? 0x0F : 0xF0;
        *byte = static_cast<uint8_t>((*byte & ~mask) | (code & mask));
      }
    }
  }

  const CastLane& lane_;
  const uint64_t origin_;
  const bool whole_;
};

// Eight elements of a row, rounded to nominal.
template <class Storage, class Nominal>
struct NominalRow {
  float2 x[kColumns / 2];

  __device__ explicit NominalRow(const CastRow& row) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) x[i] = to_nominal<Storage, Nominal>(row[2 * i], row[2 * i + 1]);
  }

  template <class E>
  __device__ auto codes(float multiplier) const {
    float2 y[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) y[i] = {x[i].x * multiplier, x[i].y * multiplier};
    return Encoder<E>::encode8(y);
  }
  template <class E>
  __device__ auto codes(const CastRow& multipliers) const {
    float2 y[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) y[i] = {x[i].x * multipliers[2 * i], x[i].y * multipliers[2 * i + 1]};
    return Encoder<E>::encode8(y);
  }
};

__device__ inline float scalar(const BaseList& bases, const Weight& w, column::Column base, column::Column offset) {
  return *bases.at<const float>(w, base, offset);
}

// The multiplier of the elements of the block with this packed amax.
__device__ inline float multiplier_of(const CastInputs& in, const Weight& w, int64_t amax) {
  const Format& f = in.format;
  if (f.amax_policy == AmaxPolicy::kDelayed) return scalar(in.scales, w, column::SCALE_BASE, column::SCALE_OFFSET);
  const float block = in.packed.load(amax);
  if (f.scale_rule == ScaleRule::kE8M0) return PowerOfTwoScale::multiplier(f.power_of_two_scale().code(block));
  if (f.scale_rule == ScaleRule::kTwoLevel) {
    const float tensor = scalar(in.amaxes, w, column::AMAX_BASE, column::AMAX_OFFSET);
    return f.two_level(tensor).encode_multiplier(block);
  }
  return fp32_scale(block, f.fp8_max(), f.amax_epsilon, f.power_of_2_scale);
}

// The packed amax of the block that a lane lies in.
template <Grid kGrid>
__device__ int64_t amax_of(const CastLane& lane, const Weight& w) {
  if constexpr (kGrid == Grid::kTensor) {
    return w[column::ROW_AMAX];
  } else {
    constexpr int kSide = side_of(kGrid);
    return w[column::ROW_AMAX] + lane.row / kSide * ((lane.columns + kSide - 1) / kSide) + lane.column / kSide;
  }
}

// The multiplier of the elements of a lane's 32 x 32 block, whose scale depends on its group of 4 x 4
// blocks. A warp covers eight blocks side by side: a lane reads one amax of their two groups.
__device__ inline float group_multiplier(const CastInputs& in, const Weight& w, const CastLane& lane) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int l = threadIdx.x % kWarpLanes;
  const int64_t down = (lane.rows + 31) / 32, across = (lane.columns + 31) / 32;
  const int64_t i = lane.row / 128 * 4 + l / 8, j = lane.column / 32 - l / 4 + l % 8;
  const float mine = i < down && j < across ? in.packed.load(w[column::ROW_AMAX] + i * across + j) : 0.0f;
  float most = mine;  // over the lanes of this group: bits 0 and 1 are its columns, 3 and 4 its rows
#pragma unroll
  for (int step = 1; step <= 16; step *= 2) {
    if (step != 4) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
  }
  const float block = __shfl_sync(kAll, mine, static_cast<int>(lane.row / 32 % 4) * 8 + l / 4);
  const float group = __shfl_sync(kAll, most, l / 16 * 4);
  return PowerOfTwoScale::multiplier(in.format.power_of_two_scale().code(block, group));
}

__device__ inline uint64_t data_origin(const BaseList& bases, const Weight& w, column::Column base, column::Column offset) {
  return bases.addresses[w[base]] + w[offset];
}

template <Grid kGrid>
__device__ CastLane cast_lane(const CastInputs& in, const Weight& w, const Item& item) {
  const PanelGrid grid = panel_grid(known<kGrid>(in.format), w, kCastShape);
  return find_lane<kColumns>(grid, w, item.ordinal, panel_rows(kGrid), kCastShape.warps);
}

// Thread blocks a multiprocessor: the longer arithmetic of 4-bit codes needs more warps.
template <class E>
constexpr int kMinBlocks = E::kBits == 4 ? 5 : 1;

template <class Storage, class Nominal, class E, Grid kGrid>
__global__ void __launch_bounds__(kCastShape.threads(), kMinBlocks<E>)
    cast_kernel(CastInputs in, const int64_t* table, const Item* items) {
  if (holds(in.skip)) return;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const CastLane lane = cast_lane<kGrid>(in, w, item);
  // Lanes beyond the weight hold amaxes of their group, so these are read before any lane leaves.
  const bool grouped = kGrid == Grid::kSquare32 && in.format.scale_group;
  const float in_group = grouped ? group_multiplier(in, w, lane) : 0.0f;
  if (lane.empty()) return;
  constexpr int kRows = panel_rows(kGrid);
  const MasterReader<Storage, kColumns> masters(lane, origin_of<Storage>(in.masters, w), kRows);
  const uint64_t data = data_origin(in.row_data, w, column::ROW_DATA_BASE, column::ROW_DATA_OFFSET);
  const CodeWriter<E> writer(lane, data, kRows);
  const float multiplier = grouped ? in_group : multiplier_of(in, w, amax_of<kGrid>(lane, w));
#pragma unroll 1
  for (int first = 0; first < kRows; first += kStep) {
    CastRow x[kStep];
    masters.read(first, x);
#pragma unroll
    for (int r = 0; r < kStep; ++r) {
      const NominalRow<Storage, Nominal> row(x[r]);
      writer.write(first + r, row.template codes<E>(multiplier));
    }
  }
}

// The multiplier of the elements of a block with this amax, where scales depend on nothing else.
template <Grid kGrid>
__device__ float local_multiplier(const Format& format, float amax) {
  if constexpr (rule_of(kGrid) == ScaleRule::kBF16) return bf16_multiplier(amax);
  return PowerOfTwoScale::multiplier(format.power_of_two_scale().code(amax));
}

// Multipliers of the 1 x 32 blocks under a panel of 32 rows by 256 columns, eight a lane: of row r
// and the lanes 4 b to 4 b + 3 in register r / 4 of lane r % 4 * 8 + b.
template <Grid kGrid>
class RowMultipliers {
 public:
  __device__ RowMultipliers(const CastInputs& in, const Weight& w, const CastLane& lane) {
    const int l = threadIdx.x % kWarpLanes;
    const int64_t across = lane.columns / 32, block = lane.column / 32 - l / 4 + l % 8;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int64_t row = lane.row + 4 * k + l / 8;
      const bool there = row < lane.rows && block < across;
      of_[k] = there ? in.packed.load(w[column::ROW_AMAX] + row * across + block) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) of_[k] = local_multiplier<kGrid>(in.format, of_[k]);
  }

  // The multiplier of row 8 * step + r for this lane; the whole warp calls it, with a constant `r`.
  __device__ float of(int step, int r) const {
    const float mine = step == 0 ? of_[r / 4] : step == 1 ? of_[2 + r / 4] : step == 2 ? of_[4 + r / 4] : of_[6 + r / 4];
    return __shfl_sync(0xFFFFFFFFu, mine, r % 4 * 8 + threadIdx.x % kWarpLanes / 4);
  }

 private:
  float of_[8];
};

// Rows of 32 columns have scales of their own, and so have columns of 32 rows, cast from the same read.
template <class Storage, class Nominal, class E, Grid kGrid>
__global__ void __launch_bounds__(kCastShape.threads(), 4)
    cast_rows_kernel(CastInputs in, const int64_t* table, const Item* items) {
  constexpr int kRows = panel_rows(kGrid);
  constexpr bool kTwice = kGrid == Grid::kRowsAndColumns;
  if (holds(in.skip)) return;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const CastLane lane = cast_lane<kGrid>(in, w, item);
  if (lane.row >= lane.rows) return;
  const RowMultipliers<kGrid> rows(in, w, lane);
  CastRow columns;
  if constexpr (kTwice) {
    const int64_t first_amax = w[column::COLUMN_AMAX] + lane.row / 32 * lane.columns + lane.column;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const bool there = lane.column + c < lane.columns;
      columns[c] = there ? local_multiplier<kGrid>(in.format, in.packed.load(first_amax + c)) : 0.0f;
    }
  }
  const MasterReader<Storage, kColumns> masters(lane, origin_of<Storage>(in.masters, w), kRows);
  const CodeWriter<E> rowwise(lane, data_origin(in.row_data, w, column::ROW_DATA_BASE, column::ROW_DATA_OFFSET), kRows);
  const uint64_t column_data =
      kTwice ? data_origin(in.column_data, w, column::COLUMN_DATA_BASE, column::COLUMN_DATA_OFFSET) : 0;
  const CodeWriter<E> columnwise(lane, column_data, kRows);
#pragma unroll 1
  for (int step = 0; step < kRows / kStep; ++step) {
    CastRow x[kStep];
    masters.read(step * kStep, x);
#pragma unroll
    for (int r = 0; r < kStep; ++r) {
      const NominalRow<Storage, Nominal> row(x[r]);
      rowwise.write(step * kStep + r, row.template codes<E>(rows.of(step, r)));
      if constexpr (kTwice) columnwise.write(step * kStep + r, row.template codes<E>(columns));
    }
  }
}

// Words that are only copied: NaN keeps its payload.
struct Word16 {
  using Word = uint16_t;
  __device__ static float widen(Word word) { return float_of(word); }
  __device__ static Word narrow(float x) { return static_cast<Word>(bits_of(x)); }
};

// Identity: the rounded elements themselves.
template <class Storage, class Nominal>
__global__ void __launch_bounds__(kCastShape.threads()) copy_kernel(CastInputs in, const int64_t* table, const Item* items) {
  using Word = typename Nominal::Word;
  if (holds(in.skip)) return;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  const CastLane lane = cast_lane<Grid::kTensor>(in, w, item);
  if (lane.empty()) return;
  const MasterReader<Storage, kColumns> masters(lane, origin_of<Storage>(in.masters, w), kPanelRows);
  const uint64_t out = data_origin(in.row_data, w, column::ROW_DATA_BASE, column::ROW_DATA_OFFSET) +
                       lane.element * static_cast<int64_t>(sizeof(Word));
  const bool whole = lane.whole(kPanelRows) && out % Four<Nominal>::kBytes == 0 && lane.pitch % 4 == 0;
#pragma unroll 1
  for (int first = 0; first < kPanelRows; first += kStep) {
    CastRow x[kStep];
    masters.read(first, x);
#pragma unroll
    for (int r = 0; r < kStep; ++r) {
      const uint64_t at = out + (first + r) * lane.pitch * static_cast<int64_t>(sizeof(Word));
      const CastLane::Owned owned = lane.owned(first + r);
#pragma unroll
      for (int c = 0; c < kColumns; c += 4) {
        Four<Nominal> four;
#pragma unroll
        for (int i = 0; i < 4; ++i) four.words[i] = Nominal::narrow(x[r][c + i]);
        if (whole) {
          four.store(reinterpret_cast<Word*>(at) + c);
          continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // byte by byte: nothing says that data is aligned to its words
          if (!owned.has(c + i)) continue;
#pragma unroll
          for (int b = 0; b < static_cast<int>(sizeof(Word)); ++b) {
            const int in_row = (c + i) * static_cast<int>(sizeof(Word)) + b;
            reinterpret_cast<uint8_t*>(at)[in_row] = static_cast<uint8_t>(four.words[i] >> (8 * b));
          }
        }
      }
    }
  }
}

template <class Storage, class Nominal>
void launch_cast(const CastInputs& in, const Work& work, Stream stream) {
  const auto go = [&](auto kernel) {
    launch(kernel, work.blocks, kCastShape.threads(), stream, in, table_of(work), items_of(work));
  };
  if (in.format.element == Element::kNominal) {
    if constexpr (std::is_same_v<Storage, Nominal> && sizeof(typename Storage::Word) == 2) {
      return go(copy_kernel<Word16, Word16>);
    } else {
      return go(copy_kernel<Storage, Nominal>);
    }
  }
  for_grid(in.format, [&](auto grid) {
    constexpr Grid kGrid = decltype(grid)::value;
    if constexpr (kGrid == Grid::kSquare32) {
      if (in.format.element == Element::kE4M3) return go(cast_kernel<Storage, Nominal, E4M3, kGrid>);
      if (in.format.element == Element::kE2M1) return go(cast_kernel<Storage, Nominal, E2M1, kGrid>);
    } else if constexpr (kGrid == Grid::kSquare16) {
      if (in.format.element == Element::kE2M1) return go(cast_kernel<Storage, Nominal, E2M1, kGrid>);
    } else if constexpr (kGrid == Grid::kRows) {
      if (in.format.element == Element::kInt4) return go(cast_rows_kernel<Storage, Nominal, Int4, kGrid>);
    } else if constexpr (kGrid == Grid::kRowsAndColumns) {
      if (in.format.element == Element::kE4M3) return go(cast_rows_kernel<Storage, Nominal, E4M3, kGrid>);
    } else {
      if (in.format.element == Element::kE4M3) return go(cast_kernel<Storage, Nominal, E4M3, kGrid>);
      if (in.format.element == Element::kE5M2) return go(cast_kernel<Storage, Nominal, E5M2, kGrid>);
    }
    throw std::invalid_argument("the CUDA kernels do not encode this element in blocks of this shape");
  });
}

}  // namespace

void partial_cast(const Format& format, Dtype nominal, Dtype master, DeviceBases masters, Array packed, DeviceBases amaxes,
                  DeviceBases scales, const Work& work, DeviceBases row_data, DeviceBases column_data, Flag skip,
                  Stream stream) {
  const CastInputs in{format,           bases_of(masters),  amaxes_of(packed),     bases_of(amaxes),
                      bases_of(scales), bases_of(row_data), bases_of(column_data), flag_of(skip)};
  for_masters(master, nominal, [&](auto storage, auto rounded) {
    using Storage = decltype(storage);
    using Nominal = decltype(rounded);
    launch_cast<Storage, Nominal>(in, work, stream);
  });
}

}  // namespace zerocast::cuda
