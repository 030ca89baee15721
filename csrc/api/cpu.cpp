// The stages on the CPU. Arguments have the names and the order of zerocast/backends/ops.py; tensors
// are passed as addresses, None as 0.
#include <pybind11/stl.h>

#include <stdexcept>

#include "api/enums.h"
#include "api/stage.h"
#include "api/topics.h"
#include "cpu/stages.h"

namespace py = pybind11;

namespace zerocast::api {
namespace {

using TypedBase = std::pair<uintptr_t, std::string>;
using TypedBases = std::vector<TypedBase>;
using FlatArgument = std::tuple<uintptr_t, std::string, int64_t>;  // address, dtype, elements
using TableArgument = std::pair<uintptr_t, int64_t>;

Array array_of(const TypedBase& base) { return {base.first, dtype_of(base.second)}; }

std::vector<Array> arrays_of(const TypedBases& bases) {
  std::vector<Array> arrays;
  for (const TypedBase& base : bases) arrays.push_back(array_of(base));
  return arrays;
}

Table table_of(const TableArgument& table) { return {reinterpret_cast<const int64_t*>(table.first), table.second}; }

void partial_amax(const Format& format, const std::string& nominal, const TypedBases& masters, const TableArgument& table,
                  const TypedBase& packed, int threads) {
  cpu::partial_amax(format, dtype_of(nominal), arrays_of(masters), table_of(table), array_of(packed), threads);
}

void compute_scales(const Format& format, const TypedBase& packed, const TableArgument& table, const Bases& row_scales,
                    const Bases& column_scales, const Bases& amaxes, const Bases& scales, int threads) {
  cpu::compute_scales(format, array_of(packed), table_of(table), row_scales, column_scales, amaxes, scales, threads);
}

void partial_cast(const Format& format, const std::string& nominal, const TypedBases& masters, const TypedBase& packed,
                  const Bases& amaxes, const Bases& scales, const TableArgument& table, const Bases& row_data,
                  const Bases& column_data, int threads) {
  cpu::partial_cast(format, dtype_of(nominal), arrays_of(masters), array_of(packed), amaxes, scales, table_of(table),
                    row_data, column_data, threads);
}

void roll_history(const Format& format, const TableArgument& table, const Bases& amaxes, const Bases& scales,
                  const Bases& histories, int /*threads: a row is a few elements*/) {
  cpu::roll_history(format, table_of(table), amaxes, scales, histories);
}

void transpose(const Format& format, const TableArgument& table, const Bases& row_data, const Bases& row_scales,
               const Bases& column_data, const Bases& column_scales, int threads) {
  cpu::transpose(format, table_of(table), row_data, row_scales, column_data, column_scales, threads);
}

void dequantize(const Format& format, const TypedBase& data, uintptr_t scale_inv, uintptr_t amax, int64_t rows,
                int64_t columns, bool columnwise, const TypedBase& out, int threads) {
  const Array source = array_of(data);
  const cpu::Quantized weight{source.address, scale_inv, amax, source.dtype, rows, columns, columnwise};
  cpu::dequantize(format, weight, array_of(out), threads);
}

void upcast(const Format& format, const TypedBase& data, const TypedBase& scale_inv, int64_t rows, int64_t columns,
            bool transposed, const TypedBase& codes, const TypedBase& group_scale_inv, int threads) {
  cpu::upcast(format, {data.first, scale_inv.first, rows, columns, transposed, codes.first, group_scale_inv.first}, threads);
}

void adam_step(const TypedBase& master, const TypedBase& grad, const TypedBase& exp_avg, const TypedBase& exp_avg_sq,
               const TableArgument& segments, uintptr_t scalars, float clip, int threads) {
  const AdamState state{master.first, array_of(grad), array_of(exp_avg), array_of(exp_avg_sq)};
  cpu::adam_step(state, table_of(segments).rows, segments.second, reinterpret_cast<const float*>(scalars), clip, threads);
}

std::vector<AdamState> states_of(const TypedBases& masters, const TypedBases& grads, const TypedBases& exp_avgs,
                                 const TypedBases& exp_avg_sqs) {
  const size_t n = masters.size();
  if (grads.size() != n || exp_avgs.size() != n || exp_avg_sqs.size() != n) {
    throw std::invalid_argument("as many gradients and moments as masters are needed");
  }
  std::vector<AdamState> states;
  for (size_t i = 0; i < n; ++i) {
    states.push_back({masters[i].first, array_of(grads[i]), array_of(exp_avgs[i]), array_of(exp_avg_sqs[i])});
  }
  return states;
}

void adam_amax(const Format& format, const std::string& nominal, const TypedBases& masters, const TypedBases& grads,
               const TypedBases& exp_avgs, const TypedBases& exp_avg_sqs, const TableArgument& table, uintptr_t groups,
               uintptr_t scalars, float clip, const TypedBase& packed, int threads) {
  cpu::adam_amax(format, dtype_of(nominal), states_of(masters, grads, exp_avgs, exp_avg_sqs), table_of(table),
                 reinterpret_cast<const int64_t*>(groups), reinterpret_cast<const float*>(scalars), clip, array_of(packed),
                 threads);
}

void adam_cast(const Format& format, const std::string& nominal, const TypedBases& masters, const TypedBases& grads,
               const TypedBases& exp_avgs, const TypedBases& exp_avg_sqs, const TableArgument& table, uintptr_t groups,
               uintptr_t scalars, float clip, const TypedBase& packed, const Bases& row_data, int threads) {
  cpu::adam_cast(format, dtype_of(nominal), states_of(masters, grads, exp_avgs, exp_avg_sqs), table_of(table),
                 reinterpret_cast<const int64_t*>(groups), reinterpret_cast<const float*>(scalars), clip, array_of(packed),
                 row_data, threads);
}

void quantize_gradient(const FlatArgument& grad, int64_t parts, uintptr_t messages, int threads) {
  const auto& [address, dtype, numel] = grad;
  cpu::quantize_gradient({address, dtype_of(dtype)}, numel, parts, messages, threads);
}

void add_gradients(uintptr_t messages, int64_t parts, int64_t divisor, bool adds, const FlatArgument& out, int threads) {
  const auto& [address, dtype, numel] = out;
  cpu::add_gradients(messages, parts, divisor, adds, {address, dtype_of(dtype)}, numel, threads);
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
  bind_stage(cpu, "upcast", &upcast, "fmt", "data", "scale_inv", "rows", "columns", "transposed", "codes", "group_scale_inv",
             "threads");
  bind_stage(cpu, "adam_step", &adam_step, "master", "grad", "exp_avg", "exp_avg_sq", "segments", "scalars", "clip",
             "threads");
  bind_stage(cpu, "adam_amax", &adam_amax, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs", "table",
             "groups", "scalars", "clip", "packed", "threads");
  bind_stage(cpu, "adam_cast", &adam_cast, "fmt", "nominal", "masters", "grads", "exp_avgs", "exp_avg_sqs", "table",
             "groups", "scalars", "clip", "packed", "row_data", "threads");
  bind_stage(cpu, "quantize_gradient", &quantize_gradient, "grad", "parts", "messages", "threads");
  bind_stage(cpu, "add_gradients", &add_gradients, "messages", "parts", "divisor", "adds", "out", "threads");
}

}  // namespace zerocast::api
