// The Python module jax_dsa._cuda: what there is to register with XLA, and which FFI version it was
// compiled against.

#include <nanobind/nanobind.h>

#include "ffi/targets.h"

namespace nb = nanobind;

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Target name -> handler.
nb::dict targets() {
  nb::dict out;
  out["jax_dsa.quantize_fp8.v1"] = capsule(QuantizeFp8);
  out["jax_dsa.sparse_mla_fwd.v1"] = capsule(SparseMlaFwd);
  out["jax_dsa.topk_fwd.v1"] = capsule(TopkFwd);
  return out;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("targets", &targets);
}
