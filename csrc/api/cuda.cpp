// The stages on the GPU. Arguments have the names and the order of zerocast/backends/ops.py,
// without the table; work lists made from it and the stream come last. Bases are passed as the
// address of an array of addresses in device memory, None as 0. Tensors without a table are
// compared at each call with the ranges that a stage accesses.
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <variant>

#include "api/enums.h"
#include "api/memory.h"
#include "api/stage.h"
#include "api/topics.h"
#include "cuda/geometry.h"
#include "cuda/stages.h"

namespace py = pybind11;

namespace zerocast::api {
namespace {

using TypedBases = std::pair<uintptr_t, std::string>;  // address of an array of addresses, dtype of the tensors
using WorkArgument = std::tuple<uintptr_t, int64_t, uintptr_t, int64_t>;  // table, weights, items, blocks
using StreamArgument = std::pair<uintptr_t, int>;                         // handle, device

Array array_of(const TypedBases& bases) { return {bases.first, dtype_of(bases.second)}; }

cuda::Work work_of(const WorkArgument& work) {
  const auto& [table, weights, items, blocks] = work;
  return {table, weights, items, blocks};
}

cuda::AdamState state_of(const TypedBases& master, const TypedBases& grad, const TypedBases& exp_avg,
                         const TypedBases& exp_avg_sq) {
  if (dtype_of(master.second) != Dtype::kFloat32) throw std::invalid_argument("Adam takes FP32 masters");
  return {master.first, array_of(grad), array_of(exp_avg), array_of(exp_avg_sq)};
}

cuda::Stream stream_of(const StreamArgument& stream) { return {stream.first, stream.second}; }

cuda::Stage stage_of(const std::string& name) {
  if (name == "amax") return cuda::Stage::kAmaxPanels;
  if (name == "cast") return cuda::Stage::kCastPanels;
  if (name == "adam_cast") return cuda::Stage::kOnePass;
  if (name == "adam_8bit_cast") return cuda::Stage::kOnePass8bit;
  if (name == "scales") return cuda::Stage::kScales;
  if (name == "transpose") return cuda::Stage::kTranspose;
  if (name == "transpose_scales") return cuda::Stage::kTransposeScales;
  throw std::invalid_argument("unknown kind of work '" + name + "'");
}

// Returns (first ordinal, count) of the thread blocks of each weight of a table in host memory.
std::vector<std::pair<int64_t, int64_t>> ordinals(const std::string& stage, const Format& format, const Memory& table) {
  const bool is_owned = stage == "amax" || stage == "cast" || stage == "adam_cast" || stage == "adam_8bit_cast";
  const Table rows = Rows(format, table, is_owned ? Spans::kRead : Spans::kUnread).table();
  if (stage == "adam_cast" || stage == "adam_8bit_cast") check_whole_blocks(format, rows);
  std::vector<std::pair<int64_t, int64_t>> found;
  for (int64_t i = 0; i < rows.size; ++i) {
    if (format.block && (rows[i].rows() > INT32_MAX || rows[i].columns() > INT32_MAX)) {
      throw std::invalid_argument("the CUDA kernels take blocked weights of at most 2^31 - 1 rows and columns");
    }
    const cuda::Ordinals of_weight = cuda::ordinals(stage_of(stage), format, rows[i]);
    if (of_weight.first + of_weight.count > INT32_MAX) throw std::invalid_argument("a weight needs too many thread blocks");
    found.emplace_back(of_weight.first, of_weight.count);
  }
  return found;
}

void partial_amax(const Format& format, const std::string& nominal, const TypedBases& masters, const Memory& packed,
                  const WorkArgument& work, const StreamArgument& stream) {
  cuda::partial_amax(format, dtype_of(nominal), dtype_of(masters.second), masters.first, work_of(work),
                     array_of("packed", packed), stream_of(stream));
}

void compute_scales(const Format& format, const Memory& packed, cuda::DeviceBases row_scales,
                    cuda::DeviceBases column_scales, cuda::DeviceBases amaxes, cuda::DeviceBases scales, cuda::Flag skip,
                    const WorkArgument& work, uintptr_t partial, const StreamArgument& stream) {
  cuda::compute_scales(format, array_of("packed", packed), work_of(work), row_scales, column_scales, amaxes, scales, partial,
                       skip, stream_of(stream));
}

void partial_cast(const Format& format, const std::string& nominal, const TypedBases& masters, const Memory& packed,
                  cuda::DeviceBases amaxes, cuda::DeviceBases scales, cuda::DeviceBases row_data,
                  cuda::DeviceBases column_data, cuda::Flag skip, const WorkArgument& work, const StreamArgument& stream) {
  cuda::partial_cast(format, dtype_of(nominal), dtype_of(masters.second), masters.first, array_of("packed", packed), amaxes,
                     scales, work_of(work), row_data, column_data, skip, stream_of(stream));
}

void roll_history(const Format& format, cuda::DeviceBases amaxes, cuda::DeviceBases scales, cuda::DeviceBases histories,
                  cuda::Flag skip, const WorkArgument& work, const StreamArgument& stream) {
  cuda::roll_history(format, work_of(work), amaxes, scales, histories, skip, stream_of(stream));
}

// The device address of an array of addresses, or the addresses themselves.
using BasesArgument = std::variant<uintptr_t, std::vector<uint64_t>>;

cuda::Bases bases_of(const BasesArgument& argument) {
  cuda::Bases bases;
  if (std::holds_alternative<uintptr_t>(argument)) {
    bases.array = std::get<uintptr_t>(argument);
    return bases;
  }
  const auto& few = std::get<std::vector<uint64_t>>(argument);
  if (few.size() > cuda::kFewBases) throw std::invalid_argument("more bases than a kernel takes as arguments");
  std::copy(few.begin(), few.end(), bases.few);
  return bases;
}

void transpose(const Format& format, const BasesArgument& row_data, const BasesArgument& row_scales,
               const BasesArgument& column_data, const BasesArgument& column_scales, const WorkArgument& data,
               const WorkArgument& scales, const StreamArgument& stream) {
  cuda::transpose(format, work_of(data), work_of(scales), bases_of(row_data), bases_of(row_scales), bases_of(column_data),
                  bases_of(column_scales), stream_of(stream));
}

void dequantize(const Format& format, const Memory& data, const Memory& scale_inv, const Memory& amax, int64_t rows,
                int64_t columns, bool columnwise, const Memory& out, const StreamArgument& stream) {
  check_dequantize(format, data, scale_inv, amax, rows, columns, columnwise, out);
  const Dtype dtype = format.element == Element::kNominal ? dtype_of(data.dtype) : Dtype::kFloat32;
  const cuda::Quantized weight{data.address, scale_inv.address, amax.address, dtype, rows, columns, columnwise};
  cuda::dequantize(format, weight, array_of("out", out), stream_of(stream));
}

void upcast(const Format& format, const Memory& data, const Memory& scale_inv, const Memory& amax, int64_t rows,
            int64_t columns, bool transposed, const Memory& codes, const Memory& group_scale_inv,
            const StreamArgument& stream) {
  check_upcast(format, data, scale_inv, amax, rows, columns, transposed, codes, group_scale_inv);
  cuda::upcast(
      format,
      {{data.address, scale_inv.address, amax.address, rows, columns, transposed, codes.address, group_scale_inv.address}},
      stream_of(stream));
}

void upcast_together(const Format& format, const Memories& data, const Memories& scale_inv, const Memories& amaxes,
                     const std::vector<std::pair<int64_t, int64_t>>& shapes, bool transposed, const Memories& codes,
                     const Memories& group_scale_inv, const StreamArgument& stream) {
  const auto weights =
      check_upcasts<cuda::Upcast>(format, data, scale_inv, amaxes, shapes, transposed, codes, group_scale_inv);
  cuda::upcast(format, weights, stream_of(stream));
}

cuda::Adam8bitState state_8bit_of(const TypedBases& masters, const TypedBases& grads, const TypedBases& exp_avgs,
                                  const TypedBases& exp_avg_sqs, const TypedBases& scales) {
  const bool as_needed = masters.second == "float32" && exp_avgs.second == "int8" && exp_avg_sqs.second == "uint8" &&
                         scales.second == "float32";
  if (!as_needed) {
    throw std::invalid_argument("Adam in 8 bits takes FP32 masters and scales, and codes that are int8 and uint8; got " +
                                masters.second + ", " + scales.second + ", " + exp_avgs.second + ", " + exp_avg_sqs.second);
  }
  return {masters.first, array_of(grads), exp_avgs.first, exp_avg_sqs.first, scales.first};
}

void adam_8bit(const Format& format, const std::string& nominal, const TypedBases& masters, const TypedBases& grads,
               const TypedBases& exp_avgs, const TypedBases& exp_avg_sqs, const TypedBases& moment_scales,
               const WorkArgument& pieces, uintptr_t scalars, uintptr_t clip, uintptr_t steps, const Memory& packed,
               const Memory& cut_largest, bool finishes, cuda::Flag skip, const WorkArgument& work,
               const StreamArgument& stream) {
  cuda::adam_8bit(format, dtype_of(nominal), state_8bit_of(masters, grads, exp_avgs, exp_avg_sqs, moment_scales),
                  work_of(work), work_of(pieces), {scalars, clip, skip}, steps, array_of("packed", packed),
                  cut_largest_of(cut_largest), finishes, stream_of(stream));
}

void adam_8bit_cast(const Format& format, const std::string& nominal, const TypedBases& masters, const TypedBases& grads,
                    const TypedBases& exp_avgs, const TypedBases& exp_avg_sqs, const TypedBases& moment_scales,
                    uintptr_t pieces, uintptr_t scalars, uintptr_t clip, uintptr_t steps, const Memory& packed,
                    cuda::DeviceBases row_data, cuda::Flag skip, const WorkArgument& work, const StreamArgument& stream) {
  cuda::adam_8bit_cast(format, dtype_of(nominal), state_8bit_of(masters, grads, exp_avgs, exp_avg_sqs, moment_scales),
                       work_of(work), pieces, {scalars, clip, skip}, steps, array_of("packed", packed), row_data,
                       stream_of(stream));
}

void adam_amax(const Format& format, const std::string& nominal, const TypedBases& masters, const TypedBases& grads,
               const TypedBases& exp_avgs, const TypedBases& exp_avg_sqs, uintptr_t groups, uintptr_t scalars,
               uintptr_t clip, const Memory& packed, cuda::Flag skip, const WorkArgument& work,
               const StreamArgument& stream) {
  cuda::adam_amax(format, dtype_of(nominal), state_of(masters, grads, exp_avgs, exp_avg_sqs), work_of(work), groups,
                  {scalars, clip, skip}, array_of("packed", packed), stream_of(stream));
}

void adam_cast(const Format& format, const std::string& nominal, const TypedBases& masters, const TypedBases& grads,
               const TypedBases& exp_avgs, const TypedBases& exp_avg_sqs, uintptr_t groups, uintptr_t scalars,
               uintptr_t clip, const Memory& packed, cuda::DeviceBases row_data, cuda::Flag skip, const WorkArgument& work,
               const StreamArgument& stream) {
  cuda::adam_cast(format, dtype_of(nominal), state_of(masters, grads, exp_avgs, exp_avg_sqs), work_of(work), groups,
                  {scalars, clip, skip}, array_of("packed", packed), row_data, stream_of(stream));
}

void quantize_gradient(const Memory& grad, int64_t parts, const Memory& messages, const StreamArgument& stream) {
  const int64_t numel = check_quantize_gradient(grad, parts, messages);
  cuda::quantize_gradient(array_of("grad", grad), numel, parts, messages.address, stream_of(stream));
}

void add_gradients(const Memory& messages, int64_t parts, int64_t divisor, bool adds, const Memory& out,
                   const StreamArgument& stream) {
  const int64_t numel = check_add_gradients(messages, parts, out);
  const Array sum = array_of("out", out);
  if (messages.dtype == "uint8") {
    cuda::add_gradients(messages.address, parts, divisor, adds, sum, numel, stream_of(stream));
  } else {
    cuda::add_plain_gradients(array_of("messages", messages), parts, divisor, adds, sum, numel, stream_of(stream));
  }
}

void lay_out(const Memories& gradients, int64_t ranks, const Memory& out, const StreamArgument& stream) {
  std::vector<int64_t> numels;
  int64_t numel = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    numels.push_back(check_parts("a gradient", gradients[i], ranks));
    numel += numels.back();
  }
  if (elements_of("out", out) != numel) {
    throw std::invalid_argument("out has " + std::to_string(elements_of("out", out)) + " elements and the gradients " +
                                std::to_string(numel));
  }
  cuda::lay_out(gradients.addresses, numels, dtype_of(gradients.dtype), ranks, array_of("out", out), stream_of(stream));
}

// Returns the input of a product, which must have `rows` x `columns` elements.
Array input_of(const Memory& x, int64_t rows, int64_t columns) {
  const Array array = array_of("x", x);
  if (rows < 0 || columns < 0 || (columns && rows > x.bytes / columns / size_of(array.dtype))) {
    throw std::invalid_argument("x has " + std::to_string(x.bytes) + " bytes, not " + std::to_string(rows) + "x" +
                                std::to_string(columns) + " elements of " + x.dtype);
  }
  return array;
}

void quantize_groups(const Memory& x, int64_t rows, int64_t columns, const std::string& element, bool power_of_2,
                     uintptr_t codes, uintptr_t scale_inv, const StreamArgument& stream) {
  cuda::quantize_groups(input_of(x, rows, columns), rows, columns, element_of(element), power_of_2, codes, scale_inv,
                        stream_of(stream));
}

using DirectionArgument = std::tuple<int64_t, uintptr_t, uintptr_t>;  // rows or tokens, codes, scale_inv

cuda::BothWays both_ways_of(const DirectionArgument& rowwise, const DirectionArgument& turned, bool is_square) {
  const auto& [rows, codes, scale_inv] = rowwise;
  const auto& [tokens, turned_codes, turned_scale_inv] = turned;
  return {rows, codes, scale_inv, tokens, turned_codes, turned_scale_inv, is_square};
}

void quantize_groups_both_ways(const Memory& x, int64_t rows, int64_t columns, const std::string& element, bool power_of_2,
                               bool is_square, const DirectionArgument& rowwise, const DirectionArgument& turned,
                               const StreamArgument& stream) {
  cuda::quantize_groups_both_ways(input_of(x, rows, columns), rows, columns, element_of(element), power_of_2,
                                  both_ways_of(rowwise, turned, is_square), stream_of(stream));
}

void quantize_tensor_both_ways(const Memory& x, int64_t rows, int64_t columns, const std::string& element,
                               const DirectionArgument& rowwise, const DirectionArgument& turned, uintptr_t amax_bits,
                               const StreamArgument& stream) {
  cuda::quantize_tensor_both_ways(input_of(x, rows, columns), rows, columns, element_of(element),
                                  both_ways_of(rowwise, turned, false), amax_bits, stream_of(stream));
}

void tensor_amax(const Memory& x, int64_t numel, uintptr_t amax_bits, const StreamArgument& stream) {
  cuda::tensor_amax(input_of(x, 1, numel), numel, amax_bits, stream_of(stream));
}

void quantize_tensor(const Memory& x, int64_t numel, const std::string& element, uintptr_t codes, uintptr_t scale_inv,
                     uintptr_t amax_bits, const StreamArgument& stream) {
  cuda::quantize_tensor(input_of(x, 1, numel), numel, element_of(element), codes, scale_inv, amax_bits, stream_of(stream));
}

}  // namespace

void register_cuda(py::module_& cuda) {
  const py::call_guard<py::gil_scoped_release> free;
  cuda.attr("PARTIAL_AMAXES") = cuda::kPartialAmaxes;
  cuda.attr("FEW_BASES") = cuda::kFewBases;
  cuda.attr("MOMENT_GROUPS") = cuda::kMomentGroups;
  cuda.def("targets", &cuda::targets);
  cuda.def("ordinals", &ordinals);
  bind_stage(cuda, "partial_amax", &partial_amax, "fmt", "nominal", "masters", "packed", "work", "stream");
  bind_stage(cuda, "compute_scales", &compute_scales, "fmt", "packed", "row_scales", "column_scales", "amaxes", "scales",
             "skip", "work", "partial", "stream");
  bind_stage(cuda, "partial_cast", &partial_cast, "fmt", "nominal", "masters", "packed", "amaxes", "scales", "row_data",
             "column_data", "skip", "work", "stream");
  bind_stage(cuda, "roll_history", &roll_history, "fmt", "amaxes", "scales", "histories", "skip", "work", "stream");
  bind_stage(cuda, "transpose", &transpose, "fmt", "row_data", "row_scales", "column_data", "column_scales", "data_work",
             "scale_work", "stream");
  bind_stage(cuda, "dequantize", &dequantize, "fmt", "data", "scale_inv", "amax", "rows", "columns", "columnwise", "out",
             "stream");
  bind_stage(cuda, "upcast", &upcast, "fmt", "data", "scale_inv", "amax", "rows", "columns", "transposed", "codes",
             "group_scale_inv", "stream");
  bind_stage(cuda, "upcast_together", &upcast_together, "fmt", "data", "scale_inv", "amaxes", "shapes", "transposed",
             "codes", "group_scale_inv", "stream");
  bind_stage(cuda, "adam_8bit", &adam_8bit, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs", "moment_scales",
             "pieces", "scalars", "clip", "steps", "packed", "cut_largest", "finishes", "skip", "work", "stream");
  bind_stage(cuda, "adam_8bit_cast", &adam_8bit_cast, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs",
             "moment_scales", "pieces", "scalars", "clip", "steps", "packed", "row_data", "skip", "work", "stream");
  bind_stage(cuda, "adam_amax", &adam_amax, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs", "groups",
             "scalars", "clip", "packed", "skip", "work", "stream");
  bind_stage(cuda, "adam_cast", &adam_cast, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs", "groups",
             "scalars", "clip", "packed", "row_data", "skip", "work", "stream");
  bind_stage(cuda, "quantize_gradient", &quantize_gradient, "grad", "parts", "messages", "stream");
  bind_stage(cuda, "add_gradients", &add_gradients, "messages", "parts", "divisor", "adds", "out", "stream");
  cuda.attr("INPUT_GROUP") = cuda::kInputGroup;
  cuda.def("quantize_groups", &quantize_groups, free);
  cuda.def("quantize_groups_both_ways", &quantize_groups_both_ways, free);
  cuda.def("tensor_amax", &tensor_amax, free);
  cuda.def("quantize_tensor", &quantize_tensor, free);
  cuda.def("quantize_tensor_both_ways", &quantize_tensor_both_ways, free);
  cuda.def("lay_out", &lay_out, free);
}

}  // namespace zerocast::api

// A module of its own, since kernels are installed apart from the rest: setup.py builds it as
// zerocast.backends._cuda, kernels/setup.py as zerocast_kernels._cuda.
PYBIND11_MODULE(_cuda, m) {
  m.doc() = "zerocast's CUDA kernels; use them through zerocast.backends";
  zerocast::api::register_descriptor(m);
  zerocast::api::register_cuda(m);
}
