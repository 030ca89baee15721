// The stages on the CPU. Arguments have the names and the order of zerocast/backends/ops.py. What a
// stage will touch is compared with its tensors at each call, its table too.
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>

#include "api/enums.h"
#include "api/memory.h"
#include "api/stage.h"
#include "api/topics.h"
#include "cpu/stages.h"

namespace py = pybind11;

namespace zerocast::api {
namespace {

void partial_amax(const Format& format, const std::string& nominal, const Memories& masters, const Memory& table,
                  const Memory& packed, int threads) {
  const Rows rows(format, table, Spans::kRead);
  rows.check_masters("masters", masters, "floats");
  rows.check_packed(packed, false);
  cpu::partial_amax(format, dtype_of(nominal), arrays_of("masters", masters), rows.table(), array_of("packed", packed),
                    threads);
}

void compute_scales(const Format& format, const Memory& packed, const Memory& table, const Memories& row_scales,
                    const Memories& column_scales, const Memories& amaxes, const Memories& scales, int threads) {
  const Rows rows(format, table, Spans::kUnread);
  const bool both = format.columnwise == Columnwise::kOwnGrid || format.columnwise == Columnwise::kShared;
  rows.check_packed(packed, true);
  rows.check_scales(row_scales, column_scales, both);
  if (format.has_tensor_amax()) rows.check_floats("amaxes", amaxes, column::AMAX_BASE, column::AMAX_OFFSET, 1, true);
  if (format.amax_policy == AmaxPolicy::kDelayed) {
    rows.check_floats("scales", scales, column::SCALE_BASE, column::SCALE_OFFSET, 1, true);
  }
  cpu::compute_scales(format, array_of("packed", packed), rows.table(), row_scales.addresses, column_scales.addresses,
                      amaxes.addresses, scales.addresses, threads);
}

void partial_cast(const Format& format, const std::string& nominal, const Memories& masters, const Memory& packed,
                  const Memories& amaxes, const Memories& scales, const Memory& table, const Memories& row_data,
                  const Memories& column_data, int threads) {
  const Rows rows(format, table, Spans::kRead);
  rows.check_masters("masters", masters, "floats");
  rows.check_codes(dtype_of(nominal), row_data, &column_data);
  if (format.amax_policy == AmaxPolicy::kDelayed) {
    rows.check_floats("scales", scales, column::SCALE_BASE, column::SCALE_OFFSET, 1, false);
  } else {
    rows.check_packed(packed, false);
  }
  if (format.scale_rule == ScaleRule::kTwoLevel) {
    rows.check_floats("amaxes", amaxes, column::AMAX_BASE, column::AMAX_OFFSET, 1, false);
  }
  cpu::partial_cast(format, dtype_of(nominal), arrays_of("masters", masters), array_of("packed", packed), amaxes.addresses,
                    scales.addresses, rows.table(), row_data.addresses, column_data.addresses, threads);
}

void roll_history(const Format& format, const Memory& table, const Memories& amaxes, const Memories& scales,
                  const Memories& histories, int /*threads: a row is a few elements*/) {
  const Rows rows(format, table, Spans::kUnread);
  if (format.amax_history_len < 1) throw std::invalid_argument("only formats of delayed scaling have a history");
  rows.check_floats("amaxes", amaxes, column::AMAX_BASE, column::AMAX_OFFSET, 1, true);
  rows.check_floats("scales", scales, column::SCALE_BASE, column::SCALE_OFFSET, 1, true);
  rows.check_floats("histories", histories, column::HISTORY_BASE, column::HISTORY_OFFSET, format.amax_history_len, true);
  cpu::roll_history(format, rows.table(), amaxes.addresses, scales.addresses, histories.addresses);
}

void transpose(const Format& format, const Memory& table, const Memories& row_data, const Memories& row_scales,
               const Memories& column_data, const Memories& column_scales, int threads) {
  const Rows rows(format, table, Spans::kUnread);
  rows.check_whole_codes(row_data, column_data);
  if (format.block) rows.check_scales(row_scales, column_scales, true);
  cpu::transpose(format, rows.table(), row_data.addresses, row_scales.addresses, column_data.addresses,
                 column_scales.addresses, threads);
}

void dequantize(const Format& format, const Memory& data, const Memory& scale_inv, const Memory& amax, int64_t rows,
                int64_t columns, bool columnwise, const Memory& out, int threads) {
  check_dequantize(format, data, scale_inv, amax, rows, columns, columnwise, out);
  const Dtype dtype = format.element == Element::kNominal ? dtype_of(data.dtype) : Dtype::kFloat32;
  const cpu::Quantized weight{data.address, scale_inv.address, amax.address, dtype, rows, columns, columnwise};
  cpu::dequantize(format, weight, array_of("out", out), threads);
}

void upcast(const Format& format, const Memory& data, const Memory& scale_inv, const Memory& amax, int64_t rows,
            int64_t columns, bool transposed, const Memory& codes, const Memory& group_scale_inv, int threads) {
  check_upcast(format, data, scale_inv, amax, rows, columns, transposed, codes, group_scale_inv);
  cpu::upcast(
      format,
      {{data.address, scale_inv.address, amax.address, rows, columns, transposed, codes.address, group_scale_inv.address}},
      threads);
}

void upcast_together(const Format& format, const Memories& data, const Memories& scale_inv, const Memories& amaxes,
                     const std::vector<std::pair<int64_t, int64_t>>& shapes, bool transposed, const Memories& codes,
                     const Memories& group_scale_inv, int threads) {
  const auto weights =
      check_upcasts<cpu::Upcast>(format, data, scale_inv, amaxes, shapes, transposed, codes, group_scale_inv);
  cpu::upcast(format, weights, threads);
}

// A gradient or a moment.
Array adam_array(const char* name, const Memory& memory) {
  const Array array = array_of(name, memory);
  if (array.dtype == Dtype::kFloat16)
    throw std::invalid_argument(std::string(name) + " is float32 or bfloat16, got float16");
  return array;
}

AdamState state_of(const Memory& master, const Memory& grad, const Memory& exp_avg, const Memory& exp_avg_sq) {
  if (exp_avg.dtype != exp_avg_sq.dtype) {
    throw std::invalid_argument("both moments are of one dtype, got " + exp_avg.dtype + " and " + exp_avg_sq.dtype);
  }
  return {master.address, adam_array("grad", grad), adam_array("exp_avg", exp_avg), adam_array("exp_avg_sq", exp_avg_sq)};
}

cpu::Adam8bitStep step_of(const Memory& pieces, const Memory& scalars, float clip, const Memory& steps) {
  return {reinterpret_cast<const MomentPiece*>(pieces.address), reinterpret_cast<const float*>(scalars.address), clip,
          reinterpret_cast<const int64_t*>(steps.address)};
}

std::vector<cpu::Adam8bitState> states_8bit_of(const Memories& masters, const Memories& grads, const Memories& exp_avgs,
                                               const Memories& exp_avg_sqs, const Memories& scales) {
  std::vector<cpu::Adam8bitState> states;
  for (size_t i = 0; i < masters.size(); ++i) {
    check_reach("master", masters[i], "float32", masters[i].bytes);
    check_reach("exp_avg", exp_avgs.at(i), "int8", exp_avgs.at(i).bytes);
    check_reach("exp_avg_sq", exp_avg_sqs.at(i), "uint8", exp_avg_sqs.at(i).bytes);
    check_reach("moment_scales", scales.at(i), "float32", scales.at(i).bytes);
    states.push_back({reinterpret_cast<float*>(masters.addresses[i]), adam_array("grad", grads.at(i)),
                      reinterpret_cast<int8_t*>(exp_avgs.addresses[i]), reinterpret_cast<uint8_t*>(exp_avg_sqs.addresses[i]),
                      reinterpret_cast<float*>(scales.addresses[i])});
  }
  return states;
}

std::vector<Adam8bitSizes> sizes_of(const Memories& masters, const Memories& grads, const Memories& exp_avgs,
                                    const Memories& exp_avg_sqs, const Memories& scales) {
  std::vector<Adam8bitSizes> sizes;
  for (size_t i = 0; i < masters.size(); ++i) {
    const int64_t numel = std::min({elements_of("master", masters[i]), elements_of("grad", grads.at(i)),
                                    exp_avgs.at(i).bytes, exp_avg_sqs.at(i).bytes});
    sizes.push_back({numel, elements_of("moment_scales", scales.at(i))});
  }
  return sizes;
}

void adam_8bit(const Format& format, const std::string& nominal, const Memories& masters, const Memories& grads,
               const Memories& exp_avgs, const Memories& exp_avg_sqs, const Memories& moment_scales, const Memory& table,
               const Memory& pieces, const Memory& scalars, float clip, const Memory& steps, const Memory& packed,
               const Memory& cut_largest, bool finishes, int threads) {
  const auto states = states_8bit_of(masters, grads, exp_avgs, exp_avg_sqs, moment_scales);
  const Rows rows(format, table, Spans::kRead);
  const CutLargest cuts = cut_largest_of(cut_largest);
  check_moment_pieces(pieces, scalars, steps, sizes_of(masters, grads, exp_avgs, exp_avg_sqs, moment_scales), cuts.count,
                      rows.table());
  rows.check_packed(packed, false);
  cpu::adam_8bit(format, dtype_of(nominal), states, rows.table(), step_of(pieces, scalars, clip, steps),
                 array_of("packed", packed), cuts, finishes, threads);
}

void adam_8bit_cast(const Format& format, const std::string& nominal, const Memories& masters, const Memories& grads,
                    const Memories& exp_avgs, const Memories& exp_avg_sqs, const Memories& moment_scales,
                    const Memory& table, const Memory& pieces, const Memory& scalars, float clip, const Memory& steps,
                    const Memory& packed, const Memories& row_data, int threads) {
  const auto states = states_8bit_of(masters, grads, exp_avgs, exp_avg_sqs, moment_scales);
  const Rows rows(format, table, Spans::kRead);
  check_moment_pieces(pieces, scalars, steps, sizes_of(masters, grads, exp_avgs, exp_avg_sqs, moment_scales), 0,
                      rows.table());
  rows.check_packed(packed, false);
  rows.check_codes(dtype_of(nominal), row_data, nullptr);
  cpu::adam_8bit_cast(format, dtype_of(nominal), states, rows.table(), step_of(pieces, scalars, clip, steps),
                      array_of("packed", packed), row_data.addresses, threads);
}

// The loops are chosen once, for the first of them.
std::vector<AdamState> states_of(const Rows& rows, const Memories& masters, const Memories& grads, const Memories& exp_avgs,
                                 const Memories& exp_avg_sqs) {
  const size_t n = masters.size();
  if (grads.size() != n || exp_avgs.size() != n || exp_avg_sqs.size() != n) {
    throw std::invalid_argument("as many gradients and moments as masters are needed");
  }
  if (n == 0) return {};
  rows.check_masters("masters", masters, "float32");
  rows.check_masters("grads", grads, grads.dtype.c_str());
  rows.check_masters("exp_avgs", exp_avgs, exp_avgs.dtype.c_str());
  rows.check_masters("exp_avg_sqs", exp_avg_sqs, exp_avgs.dtype.c_str());
  std::vector<AdamState> states;
  for (size_t i = 0; i < n; ++i) states.push_back(state_of(masters[i], grads[i], exp_avgs[i], exp_avg_sqs[i]));
  return states;
}

void adam_amax(const Format& format, const std::string& nominal, const Memories& masters, const Memories& grads,
               const Memories& exp_avgs, const Memories& exp_avg_sqs, const Memory& table, const Memory& groups,
               const Memory& scalars, float clip, const Memory& packed, int threads) {
  const Rows rows(format, table, Spans::kRead);
  const std::vector<AdamState> states = states_of(rows, masters, grads, exp_avgs, exp_avg_sqs);
  rows.check_groups(groups, scalars);
  rows.check_packed(packed, false);
  cpu::adam_amax(format, dtype_of(nominal), states, rows.table(), reinterpret_cast<const int64_t*>(groups.address),
                 reinterpret_cast<const float*>(scalars.address), clip, array_of("packed", packed), threads);
}

void adam_cast(const Format& format, const std::string& nominal, const Memories& masters, const Memories& grads,
               const Memories& exp_avgs, const Memories& exp_avg_sqs, const Memory& table, const Memory& groups,
               const Memory& scalars, float clip, const Memory& packed, const Memories& row_data, int threads) {
  const Rows rows(format, table, Spans::kRead);
  const std::vector<AdamState> states = states_of(rows, masters, grads, exp_avgs, exp_avg_sqs);
  rows.check_groups(groups, scalars);
  rows.check_packed(packed, false);
  rows.check_codes(dtype_of(nominal), row_data, nullptr);
  cpu::adam_cast(format, dtype_of(nominal), states, rows.table(), reinterpret_cast<const int64_t*>(groups.address),
                 reinterpret_cast<const float*>(scalars.address), clip, array_of("packed", packed), row_data.addresses,
                 threads);
}

void quantize_gradient(const Memory& grad, int64_t parts, const Memory& messages, int threads) {
  const int64_t numel = check_quantize_gradient(grad, parts, messages);
  cpu::quantize_gradient(array_of("grad", grad), numel, parts, messages.address, threads);
}

void add_gradients(const Memory& messages, int64_t parts, int64_t divisor, bool adds, const Memory& out, int threads) {
  const int64_t numel = check_add_gradients(messages, parts, out);
  const Array sum = array_of("out", out);
  if (messages.dtype == "uint8") {
    cpu::add_gradients(messages.address, parts, divisor, adds, sum, numel, threads);
  } else {
    cpu::add_plain_gradients(array_of("messages", messages), parts, divisor, adds, sum, numel, threads);
  }
}

}  // namespace

void register_cpu(py::module_& m) {
  py::module_ cpu = m.def_submodule("cpu", "the stages on the CPU");
  bind_stage(cpu, "partial_amax", &partial_amax, "fmt", "nominal", "masters", "table", "packed", "threads");
  bind_stage(cpu, "compute_scales", &compute_scales, "fmt", "packed", "table", "row_scales", "column_scales", "amaxes",
             "scales", "threads");
  bind_stage(cpu, "partial_cast", &partial_cast, "fmt", "nominal", "masters", "packed", "amaxes", "scales", "table",
             "row_data", "column_data", "threads");
  bind_stage(cpu, "roll_history", &roll_history, "fmt", "table", "amaxes", "scales", "histories", "threads");
  bind_stage(cpu, "transpose", &transpose, "fmt", "table", "row_data", "row_scales", "column_data", "column_scales",
             "threads");
  bind_stage(cpu, "dequantize", &dequantize, "fmt", "data", "scale_inv", "amax", "rows", "columns", "columnwise", "out",
             "threads");
  bind_stage(cpu, "upcast", &upcast, "fmt", "data", "scale_inv", "amax", "rows", "columns", "transposed", "codes",
             "group_scale_inv", "threads");
  bind_stage(cpu, "upcast_together", &upcast_together, "fmt", "data", "scale_inv", "amaxes", "shapes", "transposed", "codes",
             "group_scale_inv", "threads");
  bind_stage(cpu, "adam_8bit", &adam_8bit, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs", "moment_scales",
             "table", "pieces", "scalars", "clip", "steps", "packed", "cut_largest", "finishes", "threads");
  bind_stage(cpu, "adam_8bit_cast", &adam_8bit_cast, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs",
             "moment_scales", "table", "pieces", "scalars", "clip", "steps", "packed", "row_data", "threads");
  bind_stage(cpu, "adam_amax", &adam_amax, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs", "table",
             "groups", "scalars", "clip", "packed", "threads");
  bind_stage(cpu, "adam_cast", &adam_cast, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs", "table",
             "groups", "scalars", "clip", "packed", "row_data", "threads");
  bind_stage(cpu, "quantize_gradient", &quantize_gradient, "grad", "parts", "messages", "threads");
  bind_stage(cpu, "add_gradients", &add_gradients, "messages", "parts", "divisor", "adds", "out", "threads");
}

}  // namespace zerocast::api
