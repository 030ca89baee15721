// The extension zerocast.backends._C: pybind11 over addresses and plain data, without a torch
// header, so that one build works with every torch.
#include "api/topics.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "zerocast's compiled stages; use them through zerocast.backends";
  zerocast::api::register_descriptor(m);
  zerocast::api::register_simd(m);
  zerocast::api::register_cpu(m);
}
