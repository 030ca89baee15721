// Binds a stage together with the names of its arguments. Python compares the names with its table of
// stages once, at import (zerocast/backends/extension.py); calls then pass positions, which take
// less time on the host than keywords.
#pragma once

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace zerocast::api {

template <class... Values, class... Names>
void bind_stage(py::module_& topic, const char* stage, void (*entry)(Values...), const Names&... names) {
  static_assert(sizeof...(Values) == sizeof...(Names), "every argument of a stage has a name");
  topic.def(stage, entry, py::call_guard<py::gil_scoped_release>(), py::arg(names)...);
  if (!py::hasattr(topic, "ARGUMENTS")) topic.attr("ARGUMENTS") = py::dict();
  topic.attr("ARGUMENTS")[stage] = py::make_tuple(names...);
}

}  // namespace zerocast::api
