// Handlers of the fp8 operators.

#include "ffi/common.h"
#include "ffi/targets.h"
#include "fp8/quantize.h"

namespace jax_dsa {
namespace {

// x [..., C] -> q [..., C] e4m3, scale [..., ceil(C / 128)] f32
ffi::Error quantize_fp8(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> q,
                        ffi::Result<ffi::Buffer<ffi::F32>> scale, bool power_of_two_scale) {
  constexpr const char* kOp = "quantize_fp8";
  const auto dims = x.dimensions();
  if (dims.size() == 0) return invalid_argument(kOp, "x is a scalar");
  const auto dtype = kernel_dtype(x.element_type());
  if (!dtype) return invalid_argument(kOp, "x is not bf16, f16 or f32");
  if (q->element_type() != ffi::DataType::F8E4M3FN) return invalid_argument(kOp, "q is not e4m3");
  const auto leading = dims.first(dims.size() - 1);
  const int64_t cols = dims.back();
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "q", q->dimensions(), leading, {cols}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "scale", scale->dimensions(), leading,
                                      {ceil_div(cols, int64_t{kQuantizeBlock})}));
  int64_t rows = 1;
  for (const int64_t n : leading) rows *= n;
  const QuantizeParams params = {
      .x = x.untyped_data(),
      .q = static_cast<uint8_t*>(q->untyped_data()),
      .scale = scale->typed_data(),
      .rows = rows,
      .cols = cols,
      .dtype = *dtype,
      .power_of_two_scale = power_of_two_scale,
  };
  return launch_status(kOp, launch_quantize(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFp8, jax_dsa::quantize_fp8,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<bool>("power_of_two_scale"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
