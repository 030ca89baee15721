// The topics of the compiled modules; each registers its own functions.
#pragma once

#include <pybind11/pybind11.h>

namespace zerocast::api {

void register_descriptor(pybind11::module_& m);  // columns, Format, the sources of the kernels
void register_simd(pybind11::module_& m);        // instruction sets
void register_cpu(pybind11::module_& m);         // the stages on the CPU

}  // namespace zerocast::api
