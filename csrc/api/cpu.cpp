// The stages on the CPU. Arguments are those of zerocast/backends/README.md with addresses for tensors; an address 0 is
// None.
#include <pybind11/stl.h>

#include <stdexcept>

#include "api/enums.h"
#include "api/topics.h"
#include "cpu/stages.h"

namespace py = pybind11;

namespace zerocast::api {
namespace {

using TypedBase = std::pair<uintptr_t, std::string>;
using TypedBases = std::vector<TypedBase>;
using TableArgument = std::pair<uintptr_t, int64_t>;

Array array_of(const TypedBase& base) { return {base.first, dtype_of(base.second)}; }

std::vector<Array> arrays_of(const Bases& addresses, const std::vector<std::string>& dtypes) {
  if (addresses.size() != dtypes.size()) throw std::invalid_argument("as many dtypes as masters are needed");
  std::vector<Array> arrays;
  for (size_t i = 0; i < addresses.size(); ++i) arrays.push_back(array_of({addresses[i], dtypes[i]}));
  return arrays;
}

Table table_of(const TableArgument& table) { return {reinterpret_cast<const int64_t*>(table.first), table.second}; }

void partial_amax(const Format& format, const std::string& nominal, const Bases& masters,
                  const std::vector<std::string>& master_dtypes, const TableArgument& table, const TypedBase& packed,
                  int threads) {
  cpu::partial_amax(format, dtype_of(nominal), arrays_of(masters, master_dtypes), table_of(table), array_of(packed),
                    threads);
}

void compute_scales(const Format& format, const TypedBase& packed, const TableArgument& table, const Bases& row_scales,
                    const Bases& column_scales, const Bases& amaxes, const Bases& scales, int threads) {
  cpu::compute_scales(format, array_of(packed), table_of(table), row_scales, column_scales, amaxes, scales, threads);
}

void partial_cast(const Format& format, const std::string& nominal, const Bases& masters,
                  const std::vector<std::string>& master_dtypes, const TypedBase& packed, const Bases& amaxes,
                  const Bases& scales, const TableArgument& table, const Bases& row_data, const Bases& column_data,
                  int threads) {
  cpu::partial_cast(format, dtype_of(nominal), arrays_of(masters, master_dtypes), array_of(packed), amaxes, scales,
                    table_of(table), row_data, column_data, threads);
}

void roll_history(const Format& format, const TableArgument& table, const Bases& amaxes, const Bases& scales,
                  const Bases& histories) {
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

void adam_step(uintptr_t master, const TypedBase& grad, const TypedBase& exp_avg, const TypedBase& exp_avg_sq,
               const TableArgument& segments, uintptr_t scalars, float clip, int threads) {
  const AdamState state{master, array_of(grad), array_of(exp_avg), array_of(exp_avg_sq)};
  cpu::adam_step(state, table_of(segments).rows, segments.second, reinterpret_cast<const float*>(scalars), clip, threads);
}

void adam_amax(const Format& format, const std::string& nominal, const Bases& masters, const TypedBases& grads,
               const TypedBases& exp_avgs, const TypedBases& exp_avg_sqs, const TableArgument& table, uintptr_t groups,
               uintptr_t scalars, float clip, const TypedBase& packed, int threads) {
  const size_t n = masters.size();
  if (grads.size() != n || exp_avgs.size() != n || exp_avg_sqs.size() != n) {
    throw std::invalid_argument("as many gradients and moments as masters are needed");
  }
  std::vector<AdamState> states;
  for (size_t i = 0; i < n; ++i) {
    states.push_back({masters[i], array_of(grads[i]), array_of(exp_avgs[i]), array_of(exp_avg_sqs[i])});
  }
  cpu::adam_amax(format, dtype_of(nominal), states, table_of(table), reinterpret_cast<const int64_t*>(groups),
                 reinterpret_cast<const float*>(scalars), clip, array_of(packed), threads);
}

}  // namespace

void register_cpu(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> free;
  py::module_ cpu = m.def_submodule("cpu", "the stages on the CPU");
  cpu.def("partial_amax", &partial_amax, free);
  cpu.def("compute_scales", &compute_scales, free);
  cpu.def("partial_cast", &partial_cast, free);
  cpu.def("roll_history", &roll_history, free);
  cpu.def("transpose", &transpose, free);
  cpu.def("dequantize", &dequantize, free);
  cpu.def("adam_step", &adam_step, free);
  cpu.def("adam_amax", &adam_amax, free);
}

}  // namespace zerocast::api
