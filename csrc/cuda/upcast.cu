// Stage upcast: E2M1 codes as E4M3 codes of the same values, of the weight or of its transpose. With
// E8M0 scales in 32x32 tiles the result has one f32 scale for 128x128, with exact E4M3 scales in 16x16
// tiles one of the tensor.
//
// A thread block takes 128x128, a thread 16 neighbouring codes of four rows. Tables in shared memory
// hold the E4M3 codes of the eight magnitudes for each spread of E8M0 scales or each E4M3 scale, which
// a thread looks up four at a time. For the transpose its four rows become words along the columns, and
// those become rows of 128 bytes. A block takes two groups side by side then, so that it reads 128 bytes
// of each row, too.
#include <stdexcept>
#include <utility>

#include "cuda/dispatch.cuh"
#include "cuda/stages.h"
#include "cuda/turning.cuh"

namespace zerocast::cuda {
namespace {

constexpr int kGroup = 128;
constexpr int kCodes = 16, kRows = 4, kLanes = kGroup / kCodes, kThreads = kLanes * kGroup / kRows;  // per group
constexpr int kMagnitudes = 8;

// The groups that a thread block takes side by side.
__host__ __device__ constexpr int wide(bool transposed) { return transposed ? 2 : 1; }

struct Source {
  const uint8_t* data;
  const uint8_t* scales;
  int32_t rows, columns;
  int64_t scale_columns;  // columns of the scale buffer
  const float* amax;      // tensor amax, for exact scales
  bool aligned;           // codes can be read eight bytes at once
};

struct Target {
  uint8_t* codes;
  float* scales;
  int32_t down, across;  // groups

  // The scale of a group, and behind the last one of a row the padding.
  __device__ void store_scale(int32_t row, int32_t column, float scale) const {
    const int32_t width = (across + 3) / 4 * 4, last = column + 1 == across ? width : column + 1;
    for (int32_t c = column; c < last; ++c) scales[static_cast<int64_t>(row) * width + c] = c == column ? scale : 1.0f;
  }
};

// The greatest of 16 bytes.
__device__ uint32_t greatest_byte(uint4 w) {
  uint32_t most = __vmaxu4(__vmaxu4(w.x, w.y), __vmaxu4(w.z, w.w));
  most = __vmaxu4(most, most >> 16);
  return __vmaxu4(most, most >> 8) & 0xFF;
}

__device__ uint2 load_codes(const uint8_t* at, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint2*>(at);
  uint2 codes{};
#pragma unroll
  for (int i = 0; i < kCodes / 2; ++i) (i < 4 ? codes.x : codes.y) |= static_cast<uint32_t>(at[i]) << (i % 4 * 8);
  return codes;
}

// The E4M3 codes of the four E2M1 codes in the lower half of a word. Three bits of each choose a byte
// of the table; with the fourth set, the instruction repeats the sign of the byte that it chooses,
// which __byte_perm leaves out.
__device__ uint32_t upcast_four(uint32_t codes, uint2 table) {
  const uint32_t magnitudes = __byte_perm(table.x, table.y, codes & 0x7777u);
  uint32_t signs;  // 0xFF for a minus, else 0x80
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(signs) : "r"(0x80808080u), "r"(codes));
  return magnitudes | (signs << 7 & 0x80808080u);
}

__device__ uint4 upcast_all(uint2 codes, uint2 table) {
  return {upcast_four(codes.x, table), upcast_four(codes.x >> 16, table), upcast_four(codes.y, table),
          upcast_four(codes.y >> 16, table)};
}

struct Member {
  Source from;
  Target to;
  int32_t first_block;
};

// Weights of one launch, which are arguments of the kernel.
constexpr int kMostMembers = 32;
struct Members {
  Member members[kMostMembers];
  int32_t count;
};

template <bool kTransposed, bool kExactScales>
__global__ void __launch_bounds__(wide(kTransposed) * kThreads) upcast_kernel(const __grid_constant__ Members weights) {
  constexpr int kWide = wide(kTransposed), kWords = kGroup / 4;  // words per column
  constexpr int kTile = kExactScales ? 16 : 32, kTiles = kGroup / kTile;
  constexpr int kTables = kExactScales ? 128 : kMostSpread + 1;
  __shared__ uint2 tables[kTables];
  __shared__ __align__(16) uint8_t scales[kWide][kTiles][kTiles];
  __shared__ __align__(16) uint32_t turned[kTransposed ? kWide * kGroup * kWords : 4];
  int member = 0;
  while (member + 1 < weights.count && static_cast<int32_t>(blockIdx.x) >= weights.members[member + 1].first_block) ++member;
  const Source from = weights.members[member].from;
  const Target to = weights.members[member].to;
  // groups follow each other as the result lies in memory
  const int32_t block = static_cast<int32_t>(blockIdx.x) - weights.members[member].first_block;
  const int32_t band = block / to.across, second = block - band * to.across, first = band * kWide;
  const int32_t down = kTransposed ? second : first, across = kTransposed ? first : second;
  const int lane = threadIdx.x % (kWide * kLanes), strip = threadIdx.x / (kWide * kLanes), group = lane / kLanes;
  const int32_t row = down * kGroup + strip * kRows, column = across * kGroup + lane * kCodes;

  const bool exists = row < from.rows && column < from.columns;  // extents are multiples of 32
  uint2 codes[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t index = static_cast<int64_t>(row + r) * from.columns + column;
    if (exists) codes[r] = load_codes(from.data + index / 2, from.aligned);
  }
#pragma unroll
  for (int32_t i = threadIdx.x; i < kTables * kMagnitudes; i += kWide * kThreads) {
    const int32_t code = i % kMagnitudes, table = i / kMagnitudes;
    reinterpret_cast<uint8_t*>(tables)[i] =
        static_cast<uint8_t>(kExactScales ? exact_upcast_code(code, table) : upcast_code(code, table));
  }
  if (threadIdx.x < kWide * kTiles * kTiles) {
    const int beside = threadIdx.x / (kTiles * kTiles), i = threadIdx.x / kTiles % kTiles, j = threadIdx.x % kTiles;
    const int64_t tile_row = static_cast<int64_t>(down) * kGroup + i * kTile;  // the padding of the buffer is 0
    const int64_t tile_column = static_cast<int64_t>(across + beside) * kTiles + j;
    const bool is_there = first + beside < to.down && tile_column < from.scale_columns;
    scales[beside][i][j] = is_there ? from.scales[tile_row * from.scale_columns + tile_column] : uint8_t{0};
  }
  __syncthreads();
  const int32_t scale = scales[group][strip * kRows / kTile][lane % kLanes * kCodes / kTile];
  int32_t index;  // index in the table
  if constexpr (kExactScales) {
    if (block == 0 && threadIdx.x == 0) *to.scales = exact_upcast_scale(*from.amax);
    index = scale & (kTables - 1);
  } else {
    const int32_t largest = static_cast<int32_t>(greatest_byte(*reinterpret_cast<const uint4*>(scales[group])));
    if (strip == 0 && lane % kLanes == 0 && first + group < to.down) {
      to.store_scale(first + group, second, upcast_scale(largest));
    }
    index = smaller(largest - scale, kMostSpread);
  }
  const uint2 table = tables[index];
  uint4 fp8[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) fp8[r] = upcast_all(codes[r], table);

  if constexpr (!kTransposed) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t index = static_cast<int64_t>(row + r) * from.columns + column;
      if (exists) *reinterpret_cast<uint4*>(to.codes + index) = fp8[r];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) words[r] = (&fp8[r].x)[i];
      transpose_bytes(words);
#pragma unroll
      for (int c = 0; c < 4; ++c) turned[place<kWords, kCodes>(lane * kCodes + 4 * i + c, strip)] = words[c];
    }
    __syncthreads();
    constexpr int kPieces = kWords / 4;  // pieces of 16 bytes per column
#pragma unroll
    for (int i = threadIdx.x; i < kWide * kGroup * kPieces; i += kWide * kThreads) {
      const int c = i / kPieces, piece = i % kPieces;
      const int64_t out_row = static_cast<int64_t>(across) * kGroup + c, out_column = down * kGroup + piece * 16;
      if (out_row < from.columns && out_column < from.rows) {
        *reinterpret_cast<uint4*>(to.codes + out_row * from.rows + out_column) =
            *reinterpret_cast<const uint4*>(turned + place<kWords, kCodes>(c, piece * 4));
      }
    }
  }
}

Member member_of(const Format& format, const Upcast& weight) {
  if (weight.rows > INT32_MAX || weight.columns > INT32_MAX)
    throw std::invalid_argument("at most 2^31 - 1 rows and columns");
  if (weight.codes % sizeof(uint4)) throw std::invalid_argument("the E4M3 codes must begin at a multiple of 16 bytes");
  const GridShape groups = grid_shape({kGroup, kGroup}, weight.rows, weight.columns);
  const Source from{reinterpret_cast<const uint8_t*>(weight.data),
                    reinterpret_cast<const uint8_t*>(weight.scale_inv),
                    static_cast<int32_t>(weight.rows),
                    static_cast<int32_t>(weight.columns),
                    rowwise_scale_buffer(format, weight.rows, weight.columns).columns,
                    reinterpret_cast<const float*>(weight.amax),
                    weight.data % sizeof(uint2) == 0};
  Target to{reinterpret_cast<uint8_t*>(weight.codes), reinterpret_cast<float*>(weight.group_scale_inv),
            static_cast<int32_t>(groups.down), static_cast<int32_t>(groups.across)};
  if (weight.transposed) std::swap(to.down, to.across);
  return {from, to, 0};
}

}  // namespace

void upcast(const Format& format, const std::vector<Upcast>& weights, Stream stream) {
  const bool exact = format.exact_scales;
  const bool grouped = is(format.block, 32, 32) && is(format.scale_group, kGroup, kGroup);
  if (format.element != Element::kE2M1 || !(exact ? is(format.block, 16, 16) : grouped)) {
    throw std::invalid_argument("only E2M1 codes whose scales come in groups, or are exact, are exact in FP8");
  }
  for (size_t first = 0; first < weights.size(); first += kMostMembers) {
    const bool transposed = weights[first].transposed;
    Members members{};
    int64_t blocks = 0;
    for (size_t i = first; i < weights.size() && i < first + kMostMembers; ++i) {
      Member member = member_of(format, weights[i]);
      member.first_block = static_cast<int32_t>(blocks);
      blocks += static_cast<int64_t>((member.to.down + wide(transposed) - 1) / wide(transposed)) * member.to.across;
      if (blocks > INT32_MAX) throw std::invalid_argument("more thread blocks than a launch can have");
      members.members[members.count++] = member;
    }
    const auto kernel = transposed ? (exact ? upcast_kernel<true, true> : upcast_kernel<true, false>)
                                   : (exact ? upcast_kernel<false, true> : upcast_kernel<false, false>);
    launch(kernel, blocks, wide(transposed) * kThreads, stream, members);
  }
}

}  // namespace zerocast::cuda
