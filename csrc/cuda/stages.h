// The stages of zerocast/backends/README.md on the GPU. Each is asynchronous on a stream. Each is
// one launch for the whole table, except compute_scales of two-level scales and transposes with
// scales.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "descriptor.h"
#include "moments.h"

namespace zerocast::cuda {

// A table in device memory with the work list that `zerocast.backends.cuda.launch` made from it:
// int32 (weight, ordinal) pairs.
struct Work {
  uintptr_t table;
  int64_t weights;
  uintptr_t items;
  int64_t blocks;
};

using DeviceBases = uintptr_t;  // address of an array of addresses in device memory
using Flag = uintptr_t;         // address of a bool, or 0

struct Stream {
  uintptr_t handle;
  int device;
};

void partial_amax(const Format& format, Dtype nominal, Dtype master, DeviceBases masters, const Work& work, Array packed,
                  Stream stream);

void compute_scales(const Format& format, Array packed, const Work& work, DeviceBases row_scales, DeviceBases column_scales,
                    DeviceBases amaxes, DeviceBases scales, uintptr_t partial, Flag skip, Stream stream);

// f32 values of scratch memory a weight for compute_scales of two-level scales.
constexpr int kPartialAmaxes = 32;

void partial_cast(const Format& format, Dtype nominal, Dtype master, DeviceBases masters, Array packed, DeviceBases amaxes,
                  DeviceBases scales, const Work& work, DeviceBases row_data, DeviceBases column_data, Flag skip,
                  Stream stream);

void roll_history(const Format& format, const Work& work, DeviceBases amaxes, DeviceBases scales, DeviceBases histories,
                  Flag skip, Stream stream);

// Few bases, which are arguments of the kernel, or the address of an array of many in device memory.
// The copies that products need are temporary, and no address is copied to the device for them.
constexpr int kFewBases = 64;
struct Bases {
  DeviceBases array = 0;
  uint64_t few[kFewBases] = {};
};
void transpose(const Format& format, const Work& data, const Work& scales, const Bases& row_data, const Bases& row_scales,
               const Bases& column_data, const Bases& column_scales, Stream stream);

// One direction of one weight; `data_dtype` matters only for formats without codes.
struct Quantized {
  uintptr_t data, scale_inv, amax;
  Dtype data_dtype;
  int64_t rows, columns;
  bool columnwise;
};
void dequantize(const Format& format, const Quantized& weight, Array out, Stream stream);

// The upcast of a weight, or of its transpose, from its rowwise codes; `codes` begin at a multiple
// of 16 bytes. Either all weights of a call are transposed or none.
struct Upcast {
  uintptr_t data, scale_inv, amax;
  int64_t rows, columns;  // shape of the weight
  bool transposed;
  uintptr_t codes, group_scale_inv;
};
void upcast(const Format& format, const std::vector<Upcast>& weights, Stream stream);

// Row i of `out` gets the part of each gradient that rank i reduces. Ranks have equal parts.
void lay_out(const std::vector<uintptr_t>& gradients, const std::vector<int64_t>& numels, Dtype dtype, int64_t ranks,
             Array out, Stream stream);

struct AdamState {
  uintptr_t master;
  Array grad, exp_avg, exp_avg_sq;
};
struct AdamStep {
  uintptr_t scalars, clip;
  Flag skip;
};
// AdamW over the owned spans of a table, with the partial amaxes of the result; addresses of
// `state` are of arrays of addresses.
void adam_amax(const Format& format, Dtype nominal, const AdamState& state, const Work& work, uintptr_t groups,
               const AdamStep& step, Array packed, Stream stream);

// adam_amax for spans of full rows of blocks, and their codes.
void adam_cast(const Format& format, Dtype nominal, const AdamState& state, const Work& work, uintptr_t groups,
               const AdamStep& step, Array packed, DeviceBases row_data, Stream stream);

// adam_amax with moments in 8 bits; all addresses are of arrays of addresses. Pieces are parallel
// to the rows of the table, and have a work list of runs of groups, for formats without blocks. The
// second of two calls, after `cuts` were reduced, `finishes` shared groups. `steps` are i64 in
// device memory, one for each row of scalars.
struct Adam8bitState {
  DeviceBases masters;
  Array grads;
  DeviceBases exp_avgs, exp_avg_sqs, scales;
};
void adam_8bit(const Format& format, Dtype nominal, const Adam8bitState& state, const Work& work, const Work& pieces,
               const AdamStep& step, uintptr_t steps, Array packed, const CutLargest& cuts, bool finishes, Stream stream);

// adam_cast with moments in 8 bits, for pieces without shared groups.
void adam_8bit_cast(const Format& format, Dtype nominal, const Adam8bitState& state, const Work& work, uintptr_t pieces,
                    const AdamStep& step, uintptr_t steps, Array packed, DeviceBases row_data, Stream stream);

// The messages of the `parts` equal parts of a gradient of `numel` elements, and the sum of `parts`
// messages of `numel` elements: in FP8 (gradient_message.h), aligned to 16 bytes, or in the dtype of
// the gradient.
void quantize_gradient(Array grad, int64_t numel, int64_t parts, uintptr_t messages, Stream stream);
void add_gradients(uintptr_t messages, int64_t parts, int64_t divisor, bool adds, Array out, int64_t numel, Stream stream);
void add_plain_gradients(Array gradients, int64_t parts, int64_t divisor, bool adds, Array out, int64_t numel,
                         Stream stream);

// Not stages: the inputs of FP8 products, contiguous and aligned to 16 bytes. Codes are
// `[rows, columns]`; scales of groups, which are this many elements of a row,
// `[columns / kInputGroup, rows]`. `amax_bits` is one word, the bits of an f32, which tensor_amax
// writes.
constexpr int kInputGroup = 128;
void quantize_groups(Array x, int64_t rows, int64_t columns, Element element, bool power_of_2, uintptr_t codes,
                     uintptr_t scale_inv, Stream stream);
void tensor_amax(Array x, int64_t numel, uintptr_t amax_bits, Stream stream);
void quantize_tensor(Array x, int64_t numel, Element element, uintptr_t codes, uintptr_t scale_inv, uintptr_t amax_bits,
                     Stream stream);

// The same in both directions, of sixteen-bit elements. `codes` are `[rows, columns]`, `turned` are
// `[columns, tokens]`, with scales of groups `[tokens / kInputGroup, columns]`, rounded up: those of
// x down its columns. If `is_square`, they are `[columns / kInputGroup, bands]`, one for 128 x 128
// elements, with zeros up to a multiple of 4 bands. Rows and tokens may be more than the rows of x, by
// less than a group: zeros follow. Columns and tokens are multiples of 16.
struct BothWays {
  int64_t rows;
  uintptr_t codes, scale_inv;
  int64_t tokens;
  uintptr_t turned, turned_scale_inv;  // the scale of a whole tensor serves both directions
  bool is_square;
};
void quantize_groups_both_ways(Array x, int64_t rows, int64_t columns, Element element, bool power_of_2, const BothWays& to,
                               Stream stream);
void quantize_tensor_both_ways(Array x, int64_t rows, int64_t columns, Element element, const BothWays& to,
                               uintptr_t amax_bits, Stream stream);

// The targets that this extension has machine code for, such as "90a".
const char* targets();

}  // namespace zerocast::cuda
