// Single codes, with which tests compare the encoders with the reference over every input.
#include "api/enums.h"
#include "api/topics.h"
#include "cpu/stages.h"

namespace py = pybind11;

namespace zerocast::api {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void encode(const std::string& element, uintptr_t source, uintptr_t codes, int64_t numel) {
  cpu::encode(element_of(element), pointer<const float>(source), pointer<uint8_t>(codes), numel);
}

void decode(const std::string& element, uintptr_t codes, uintptr_t values, int64_t numel) {
  cpu::decode(element_of(element), pointer<const uint8_t>(codes), pointer<float>(values), numel);
}

void round_nominal(const std::string& nominal, uintptr_t source, uintptr_t words, int64_t numel) {
  cpu::round_nominal(dtype_of(nominal), pointer<const float>(source), pointer<void>(words), numel);
}

}  // namespace

void register_codec(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> free;
  m.def("encode", &encode, free, py::arg("element"), py::arg("source"), py::arg("codes"), py::arg("numel"));
  m.def("decode", &decode, free, py::arg("element"), py::arg("codes"), py::arg("values"), py::arg("numel"));
  m.def("round_nominal", &round_nominal, free, py::arg("nominal"), py::arg("source"), py::arg("words"), py::arg("numel"));
}

}  // namespace zerocast::api
