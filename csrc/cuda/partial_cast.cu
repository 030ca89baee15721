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

// Where the codes of a weight lie; `origin` is the address of element 0.
template <class E>
struct CodeWriter {
  using Word = typename Codes8<E>::Word;
  uint64_t origin;

  __device__ uint64_t address(int64_t element) const { return origin + element * E::kBits / 8; }

  __device__ bool aligned(const Lane& lane) const {
    return address(lane.element) % sizeof(Word) == 0 && lane.pitch * E::kBits / 8 % sizeof(Word) == 0;
  }

  __device__ void store(int64_t element, Word codes) const { __stcs(reinterpret_cast<Word*>(address(element)), codes); }

  // Those of a row of a lane that are owned. Of a byte with two codes of which one is owned, only that half changes; both
  // belong to one lane.
  __device__ __noinline__ void store_owned(const Lane& lane, int r, Word codes) const {
    uint64_t left = 0;
    memcpy(&left, &codes, sizeof codes);
#pragma unroll 1
    for (int c = 0; c < kLaneColumns; c += 8 / E::kBits, left >>= 8) {
      auto* byte = reinterpret_cast<uint8_t*>(address(lane.element + r * lane.pitch + c));
      if constexpr (E::kBits == 8) {
        if (lane.owns(r, c)) *byte = static_cast<uint8_t>(left);
      } else {
        const uint8_t mask = (lane.owns(r, c) ? 0x0F : 0) | (lane.owns(r, c + 1) ? 0xF0 : 0);
        if (mask) *byte = static_cast<uint8_t>(mask == 0xFF ? left : (*byte & ~mask) | (left & mask));
      }
    }
  }
};

// Eight elements of a row, rounded to nominal.
struct Row8 {
  float2 x[4];

  __device__ void scaled(float multiplier, float2 (&y)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = {x[i].x * multiplier, x[i].y * multiplier};
  }
  __device__ void scaled(const float (&multipliers)[kLaneColumns], float2 (&y)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = {x[i].x * multipliers[2 * i], x[i].y * multipliers[2 * i + 1]};
  }
};

template <class Storage, class Nominal>
__device__ Row8 nominal_row(const Row& x) {
  Row8 row;
#pragma unroll
  for (int i = 0; i < 4; ++i) row.x[i] = to_nominal<Storage, Nominal>(x[2 * i], x[2 * i + 1]);
  return row;
}

// Casts the elements of a lane with the multipliers that `of_row(r)` gives, one number or one a column.
template <class Storage, class Nominal, class E, class OfRow>
__device__ void cast_elements(const Elements& x, const Lane& lane, uint64_t origin, const OfRow& of_row) {
  const CodeWriter<E> writer{origin};
  const bool whole = lane.whole(0, 0) && writer.aligned(lane);
#pragma unroll
  for (int r = 0; r < kPanelRows; ++r) {
    float2 y[4];
    nominal_row<Storage, Nominal>(x[r]).scaled(of_row(r), y);
    const auto codes = Encoder<E>::encode8(y);
    if (whole) {
      writer.store(lane.element + r * lane.pitch, codes);
    } else {
      writer.store_owned(lane, r, codes);
    }
  }
}

__device__ inline float scalar(const BaseList& bases, const Weight& w, column::Column base, column::Column offset) {
  return *bases.at<const float>(w, base, offset);
}

// What the elements of the block with this packed amax are multiplied by.
__device__ inline float multiplier_of(const CastInputs& in, const Weight& w, int64_t amax) {
  const Format& f = in.format;
  if (f.amax_policy == AmaxPolicy::kDelayed) return scalar(in.scales, w, column::SCALE_BASE, column::SCALE_OFFSET);
  const float block = in.packed.load(amax);
  if (f.scale_rule == ScaleRule::kTwoLevel) {
    return TwoLevel(scalar(in.amaxes, w, column::AMAX_BASE, column::AMAX_OFFSET)).encode_multiplier(block);
  }
  return fp32_scale(block, f.fp8_max(), f.amax_epsilon, f.power_of_2_scale);
}

template <Grid kGrid>
__device__ int64_t amax_of(const Lane& lane, const Weight& w, const Format& format) {
  if constexpr (kGrid == Grid::kTensor) return w[column::ROW_AMAX];
  const int64_t rows = kGrid == Grid::kSquare16 ? 16 : format.block.rows;
  const int64_t columns = kGrid == Grid::kSquare16 ? 16 : format.block.columns;
  const int64_t across = (lane.columns + columns - 1) / columns;
  return w[column::ROW_AMAX] + lane.row / rows * across + lane.column / columns;
}

__device__ inline uint64_t data_origin(const BaseList& bases, const Weight& w, column::Column base, column::Column offset) {
  return bases.addresses[w[base]] + w[offset];
}

template <class Storage, class Nominal, class E, Grid kGrid>
__global__ void __launch_bounds__(kPanelThreads) cast_kernel(CastInputs in, const int64_t* table, const Item* items) {
  if (holds(in.skip)) return;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  Lane lane;
  if (!find_lane(panel_grid(in.format, w), w, item.ordinal, panel_rows(in.format), lane) || lane.empty()) return;
  Elements x;
  MasterReader<Storage>{origin_of<Storage>(in.masters, w)}(lane, x);
  const float multiplier = multiplier_of(in, w, amax_of<kGrid>(lane, w, in.format));
  const uint64_t origin = data_origin(in.row_data, w, column::ROW_DATA_BASE, column::ROW_DATA_OFFSET);
  cast_elements<Storage, Nominal, E>(x, lane, origin, [&](int) { return multiplier; });
}

struct ColumnMultipliers {
  float of[kLaneColumns];
};

// Both directions from one read: rows of 32 columns and columns of 32 rows have scales of their own.
template <class Storage, class Nominal, class E>
__device__ void cast_half(const CastInputs& in, const Weight& w, const Lane& lane, uint64_t master,
                          const ColumnMultipliers& columns) {
  Elements x;
  MasterReader<Storage>{master}(lane, x);
  const int64_t across = lane.columns / 32, first = w[column::ROW_AMAX] + lane.row * across + lane.column / 32;
  const uint64_t rowwise = data_origin(in.row_data, w, column::ROW_DATA_BASE, column::ROW_DATA_OFFSET);
  const uint64_t columnwise = data_origin(in.column_data, w, column::COLUMN_DATA_BASE, column::COLUMN_DATA_OFFSET);
  cast_elements<Storage, Nominal, E>(x, lane, rowwise,
                                     [&](int r) { return e8m0_multiplier(in.packed.load(first + r * across)); });
  cast_elements<Storage, Nominal, E>(x, lane, columnwise, [&](int) -> const float (&)[kLaneColumns] { return columns.of; });
}

template <class Storage, class Nominal, class E>
__global__ void __launch_bounds__(kPanelThreads) cast_twice_kernel(CastInputs in, const int64_t* table, const Item* items) {
  if (holds(in.skip)) return;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  Lane lane;
  if (!find_lane(panel_grid(in.format, w), w, item.ordinal, panel_rows(in.format), lane) || lane.empty()) return;
  const uint64_t master = origin_of<Storage>(in.masters, w);
  const int64_t first = w[column::COLUMN_AMAX] + lane.row / 32 * lane.columns + lane.column;
  ColumnMultipliers columns;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) columns.of[c] = e8m0_multiplier(in.packed.load(first + c));
  cast_half<Storage, Nominal, E>(in, w, lane, master, columns);
  const Lane second = down(lane, kPanelRows);
  if (!second.empty()) cast_half<Storage, Nominal, E>(in, w, second, master, columns);
}

// Identity: the rounded elements themselves.
template <class Storage, class Nominal>
__global__ void __launch_bounds__(kPanelThreads) copy_kernel(CastInputs in, const int64_t* table, const Item* items) {
  using Word = typename Nominal::Word;
  if (holds(in.skip)) return;
  const Item item = items[blockIdx.x];
  const Weight w = weight_of(table, item);
  Lane lane;
  if (!find_lane(panel_grid(in.format, w), w, item.ordinal, panel_rows(in.format), lane) || lane.empty()) return;
  Elements x;
  MasterReader<Storage>{origin_of<Storage>(in.masters, w)}(lane, x);
  auto* out = reinterpret_cast<Word*>(data_origin(in.row_data, w, column::ROW_DATA_BASE, column::ROW_DATA_OFFSET) +
                                      lane.element * sizeof(Word));
  const bool whole = lane.whole(0, 0) && reinterpret_cast<uint64_t>(out) % 16 == 0;
#pragma unroll
  for (int r = 0; r < kPanelRows; ++r, out += lane.pitch) {
    Word words[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) words[c] = Nominal::narrow(x[r][c]);
    if (whole) {
#pragma unroll
      for (int i = 0; i < kLaneColumns * static_cast<int>(sizeof(Word)) / 16; ++i) {
        uint4 bits;
        memcpy(&bits, words + i * 16 / sizeof(Word), 16);
        __stcs(reinterpret_cast<uint4*>(out) + i, bits);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        if (lane.owns(r, c)) out[c] = words[c];
      }
    }
  }
}

template <class Storage, class Nominal>
void launch_cast(const CastInputs& in, const Work& work, Stream stream) {
  const auto go = [&](auto kernel) {
    launch(kernel, work.blocks, kPanelThreads, stream, in, table_of(work), items_of(work));
  };
  if (in.format.element == Element::kNominal) return go(copy_kernel<Storage, Nominal>);
  for_grid(in.format, [&](auto grid) {
    constexpr Grid kGrid = decltype(grid)::value;
    if constexpr (kGrid == Grid::kSquare16) {
      if (in.format.element == Element::kE2M1) return go(cast_kernel<Storage, Nominal, E2M1, kGrid>);
    } else if constexpr (kGrid == Grid::kRowsAndColumns) {
      if (in.format.element == Element::kE4M3) return go(cast_twice_kernel<Storage, Nominal, E4M3>);
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
  for_masters(master, nominal,
              [&](auto storage, auto rounded) { launch_cast<decltype(storage), decltype(rounded)>(in, work, stream); });
}

}  // namespace zerocast::cuda
