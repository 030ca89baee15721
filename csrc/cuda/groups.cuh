// Groups of 128 elements of a row that share a scale, as warps read and encode them: for the inputs
// of FP8 products and for gradients on their way between ranks.
#pragma once

#include "cuda/codes.cuh"
#include "cuda/stages.h"

namespace zerocast::cuda {

constexpr int kElements = 8, kThreads = 256;
constexpr int kPieces = kInputGroup / kElements;  // pieces of a group, one per lane

// The greater of magnitudes in one word of 32 bits or in two of 16: bits of every type order as its
// magnitudes do, with NaN above Inf.
template <class In>
__device__ uint32_t greater(uint32_t a, uint32_t b) {
  if constexpr (sizeof(typename In::Word) == 2) return __vmaxu2(a, b & 0x7FFF7FFFu);
  return max(a, b & 0x7FFFFFFFu);
}

// The greatest magnitude in a result of `greater`, as the bits of an f32.
template <class In>
__device__ int32_t f32_bits(uint32_t magnitudes) {
  if constexpr (sizeof(typename In::Word) == 2) magnitudes = max(magnitudes & 0xFFFFu, magnitudes >> 16);
  return bits_of(In::widen(static_cast<typename In::Word>(magnitudes)));
}

// Eight neighbouring elements, in words of 32 bits as they lie.
template <class In>
struct Eight {
  static constexpr int kBytes = sizeof(typename In::Word), kWords = kElements * kBytes / 4;
  uint32_t words[kWords];

  __device__ static Eight load(const typename In::Word* at) {
    Eight eight;
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(at)[i / 4];
      memcpy(eight.words + i, &four, sizeof four);
    }
    return eight;
  }

  __device__ float operator[](int i) const {
    if constexpr (kBytes == 2) return In::widen(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
    return In::widen(static_cast<typename In::Word>(words[i % kWords]));
  }

  __device__ uint32_t greatest() const {
    uint32_t most = 0;
#pragma unroll
    for (const uint32_t word : words) most = greater<In>(most, word);
    return most;
  }

  template <class E>
  __device__ uint2 encode(float scale) const {
    float2 y[kElements / 2];
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) y[i] = {(*this)[2 * i] * scale, (*this)[2 * i + 1] * scale};
    return Encoder<E>::encode8(y);
  }
};

template <class E>
__device__ float scale_of(int32_t amax_bits, bool power_of_2) {
  return scale_or_nan(amax_bits, decode<E>(E::kLargestCode), power_of_2);
}

template <int lanes>
__device__ int32_t greatest_bits(int32_t value) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) value = larger(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

// Reduces eight results of `greater` of each lane over 16 lanes. A lane ends with the result of the
// row given by bits 3 to 1 of its index: each step hands over half of the rows.
template <class In>
__device__ uint32_t greatest_of_rows(uint32_t (&rows)[kElements]) {
#pragma unroll
  for (int half = kElements / 2; half > 0; half /= 2) {
    const bool upper = threadIdx.x & (2 * half);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const uint32_t away = upper ? rows[i] : rows[i + half], mine = upper ? rows[i + half] : rows[i];
      rows[i] = greater<In>(mine, __shfl_xor_sync(0xFFFFFFFFu, away, 2 * half));
    }
  }
  return greater<In>(rows[0], __shfl_xor_sync(0xFFFFFFFFu, rows[0], 1));
}

// A thread's part of a tile of 128 x 128: eight rows of eight columns. Thread blocks side by side
// take tiles side by side, whose reads continue each other.
template <class In>
struct Tile {
  int lane, strip;
  int64_t first_row, first_column, row, column;
  Eight<In> of_row[kElements];

  __device__ Tile(const typename In::Word* x, int64_t rows, int64_t columns, uint32_t ordinal) : of_row{} {
    const uint32_t across = static_cast<uint32_t>((columns - 1) / kInputGroup + 1), band = ordinal / across;
    lane = threadIdx.x % kPieces;
    strip = threadIdx.x / kPieces;
    first_row = static_cast<int64_t>(band) * kInputGroup;
    first_column = static_cast<int64_t>(ordinal - band * across) * kInputGroup;
    row = first_row + strip * kElements;
    column = first_column + lane * kElements;
#pragma unroll
    for (int r = 0; r < kElements; ++r) {
      if (row + r < rows && column < columns) of_row[r] = Eight<In>::load(x + (row + r) * columns + column);
    }
  }

  template <class E>
  __device__ uint2 encode_column(int c, float scale) const {
    float2 y[kElements / 2];
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      y[i] = {of_row[2 * i][c] * scale, of_row[2 * i + 1][c] * scale};
    }
    return Encoder<E>::encode8(y);
  }

  // Writes the groups along the rows. Returns the amax of the row that `greatest_of_rows` leaves the
  // lane with, as the bits of an f32.
  template <class E>
  __device__ int32_t write_groups(bool power_of_2, int64_t row_end, int64_t columns, uint8_t* codes,
                                  float* scale_inv) const {
    uint32_t of_rows[kElements];
#pragma unroll
    for (int r = 0; r < kElements; ++r) of_rows[r] = of_row[r].greatest();
    const int32_t amax_bits = f32_bits<In>(greatest_of_rows<In>(of_rows));
    const float own_scale = scale_of<E>(amax_bits, power_of_2);
    const int64_t own_row = row + lane / 2;
    if (lane % 2 == 0 && own_row < row_end)
      scale_inv[first_column / kInputGroup * row_end + own_row] = inverse_of(own_scale);
#pragma unroll
    for (int r = 0; r < kElements; ++r) {
      const uint2 eight = of_row[r].template encode<E>(__shfl_sync(0xFFFFFFFFu, own_scale, 2 * r, kPieces));
      if (row + r < row_end) *reinterpret_cast<uint2*>(codes + (row + r) * columns + column) = eight;
    }
    return amax_bits;
  }
};

}  // namespace zerocast::cuda
