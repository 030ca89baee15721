// The stages of zerocast/backends/README.md on the CPU. Each takes the whole table and opens one
// parallel region.
#pragma once

#include <vector>

#include "cpu/adam.h"
#include "descriptor.h"
#include "moments.h"

namespace zerocast::cpu {

void partial_amax(const Format& format, Dtype nominal, const std::vector<Array>& masters, const Table& table, Array packed,
                  int threads);

void compute_scales(const Format& format, Array packed, const Table& table, const Bases& row_scales,
                    const Bases& column_scales, const Bases& amaxes, const Bases& scales, int threads);

void partial_cast(const Format& format, Dtype nominal, const std::vector<Array>& masters, Array packed, const Bases& amaxes,
                  const Bases& scales, const Table& table, const Bases& row_data, const Bases& column_data, int threads);

void roll_history(const Format& format, const Table& table, const Bases& amaxes, const Bases& scales,
                  const Bases& histories);

void transpose(const Format& format, const Table& table, const Bases& row_data, const Bases& row_scales,
               const Bases& column_data, const Bases& column_scales, int threads);

// One direction of one weight; `data_dtype` matters only for formats without codes.
struct Quantized {
  uintptr_t data, scale_inv, amax;
  Dtype data_dtype;
  int64_t rows, columns;
  bool columnwise;
};
void dequantize(const Format& format, const Quantized& weight, Array out, int threads);

// The upcast of a weight, or of its transpose, from its rowwise codes.
struct Upcast {
  uintptr_t data, scale_inv, amax;
  int64_t rows, columns;  // shape of the weight
  bool transposed;
  uintptr_t codes, group_scale_inv;
};
void upcast(const Format& format, const std::vector<Upcast>& weights, int threads);

// `states` are indexed by MASTER_BASE, `groups` by the rows of the table.
void adam_amax(const Format& format, Dtype nominal, const std::vector<AdamState>& states, const Table& table,
               const int64_t* groups, const float* scalars, float clip, Array packed, int threads);

// adam_amax for spans of full rows of blocks, and their codes.
void adam_cast(const Format& format, Dtype nominal, const std::vector<AdamState>& states, const Table& table,
               const int64_t* groups, const float* scalars, float clip, Array packed, const Bases& row_data, int threads);

// Flat tensors that are updated together, with moments in 8 bits.
struct Adam8bitState {
  float* master;
  Array grad;
  int8_t* exp_avg;
  uint8_t* exp_avg_sq;
  float* scales;
};

// The further inputs of a step with moments in 8 bits: `pieces` are parallel to the rows of the
// table, `steps` to the rows of `scalars`.
struct Adam8bitStep {
  const MomentPiece* pieces;
  const float* scalars;
  float clip;
  const int64_t* steps;
};

// adam_amax with moments in 8 bits. The second of two calls, after `cut_largest` was reduced,
// `finishes` shared groups.
void adam_8bit(const Format& format, Dtype nominal, const std::vector<Adam8bitState>& states, const Table& table,
               const Adam8bitStep& step, Array packed, const CutLargest& cut_largest, bool finishes, int threads);

// adam_cast with moments in 8 bits, for pieces without shared groups.
void adam_8bit_cast(const Format& format, Dtype nominal, const std::vector<Adam8bitState>& states, const Table& table,
                    const Adam8bitStep& step, Array packed, const Bases& row_data, int threads);

// The messages of the `parts` equal parts of a gradient of `numel` elements, and the sum of `parts`
// messages of `numel` elements, in FP8 (gradient_message.h) or in the dtype of the gradient.
void quantize_gradient(Array grad, int64_t numel, int64_t parts, uintptr_t messages, int threads);
void add_gradients(uintptr_t messages, int64_t parts, int64_t divisor, bool adds, Array out, int64_t numel, int threads);
void add_plain_gradients(Array gradients, int64_t parts, int64_t divisor, bool adds, Array out, int64_t numel, int threads);

}  // namespace zerocast::cpu
