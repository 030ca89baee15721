// The topics of the extension; each registers its own functions.
#pragma once

#include <pybind11/pybind11.h>

namespace zerocast::api {

void register_descriptor(pybind11::module_& m);  // columns, Format
void register_simd(pybind11::module_& m);        // instruction sets
void register_cpu(pybind11::module_& m);         // the stages on the CPU
void register_cuda(pybind11::module_& m);        // the stages on the GPU, where they are built

}  // namespace zerocast::api
