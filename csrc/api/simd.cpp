// Binds the choice of the instruction set for the CPU stages.
#include "cpu/simd.h"

#include <pybind11/stl.h>

#include "api/topics.h"

namespace zerocast::api {

void register_simd(pybind11::module_& m) {
  m.def("simd_levels", &simd::levels);
  m.def("simd_level", &simd::level_name);
  m.def("set_simd_level", &simd::set_level, pybind11::arg("level"));
}

}  // namespace zerocast::api
