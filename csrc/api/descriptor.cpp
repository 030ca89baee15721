// Binds the descriptor columns, and the format as plain data. Both compiled modules have them, each a
// Format of its own: they may have been built with different versions of pybind11.
#include "descriptor.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "api/enums.h"
#include "api/topics.h"

namespace py = pybind11;

namespace zerocast::api {
namespace {

using Extent = std::pair<int64_t, int64_t>;

Format make_format(const std::string& element, const std::string& scale_rule, const std::string& columnwise,
                   const std::string& amax_policy, Extent block, Extent columnwise_block, Extent scale_group,
                   bool scale_rounds_down, bool exact_scales, bool power_of_2_scale, bool most_recent, float amax_epsilon,
                   int margin, int64_t amax_history_len) {
  Format f{};
  f.element = element_of(element);
  f.scale_rule = scale_rule_of(scale_rule);
  f.columnwise = columnwise_of(columnwise);
  f.amax_policy = amax_policy_of(amax_policy);
  f.block = {block.first, block.second};
  f.columnwise_block = {columnwise_block.first, columnwise_block.second};
  f.scale_group = {scale_group.first, scale_group.second};
  f.scale_rounds_down = scale_rounds_down;
  f.exact_scales = exact_scales;
  f.power_of_2_scale = power_of_2_scale;
  f.most_recent = most_recent;
  f.amax_epsilon = amax_epsilon;
  f.margin = margin;
  f.amax_history_len = amax_history_len;
  return f;
}

}  // namespace

void register_descriptor(py::module_& m) {
  m.def("columns", [] {
    std::vector<std::string> names;
#define ZC_NAME(name) names.emplace_back(#name);
    ZC_COLUMNS(ZC_NAME)
#undef ZC_NAME
    return names;
  });
  m.attr("KERNEL_SOURCES") = ZC_KERNEL_SOURCES;
  py::class_<Format>(m, "Format", py::module_local())
      .def(py::init(&make_format), py::kw_only(), py::arg("element"), py::arg("scale_rule"), py::arg("columnwise"),
           py::arg("amax_policy"), py::arg("block"), py::arg("columnwise_block"), py::arg("scale_group"),
           py::arg("scale_rounds_down"), py::arg("exact_scales"), py::arg("power_of_2_scale"), py::arg("most_recent"),
           py::arg("amax_epsilon"), py::arg("margin"), py::arg("amax_history_len"));
}

}  // namespace zerocast::api
