// Handler of the FP8 matmul.

#include "ffi/common.h"
#include "ffi/targets.h"
#include "fp8/matmul.h"

namespace jax_dsa {
namespace {

// a [B, ..., K] e4m3, a_scale [B, ..., ceil(K / 128)], b [B, N, K] e4m3,
// b_scale [B, ceil(N / 128), ceil(K / 128)], or [B, N, ceil(K / 128)] for blocks of 1x128
// -> out [B, ..., N], bf16, f16 or f32. K is a multiple of 16.
ffi::Error fp8_matmul(cudaStream_t stream, ffi::AnyBuffer a, ffi::Buffer<ffi::F32> a_scale,
                      ffi::AnyBuffer b, ffi::Buffer<ffi::F32> b_scale,
                      ffi::Result<ffi::AnyBuffer> out) {
  constexpr const char* kOp = "fp8_matmul";
  const auto a_dims = a.dimensions(), b_dims = b.dimensions();
  const auto scale_dims = b_scale.dimensions();
  if (a_dims.size() < 2) return invalid_argument(kOp, "a has no batch axis");
  if (b_dims.size() != 3 || scale_dims.size() != 3) {
    return invalid_argument(kOp, "b or b_scale is not of rank 3");
  }
  for (const auto type : {a.element_type(), b.element_type()}) {
    if (type != ffi::DataType::F8E4M3FN) return invalid_argument(kOp, "a or b is not e4m3");
  }
  const auto dtype = kernel_dtype(out->element_type());
  if (!dtype) return invalid_argument(kOp, "out is not bf16, f16 or f32");
  const int64_t batch = a_dims[0], k = a_dims.back(), n = b_dims[1];
  const int64_t blocks = ceil_div(k, int64_t{128}), row_blocks = ceil_div(n, int64_t{128});
  const bool b_rows = scale_dims[1] == n && n != row_blocks;
  const auto leading = a_dims.first(a_dims.size() - 1);
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "a_scale", a_scale.dimensions(), leading, {blocks}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "b", b_dims, {}, {batch, n, k}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "b_scale", scale_dims, {}, {batch, b_rows ? n : row_blocks, blocks}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), leading, {n}));
  if (k % 16 != 0) return invalid_argument(kOp, "K is no multiple of 16");
  int64_t rows = 1;
  for (size_t i = 1; i < leading.size(); ++i) rows *= leading[i];
  const Fp8MatmulParams params = {
      .a = static_cast<const uint8_t*>(a.untyped_data()),
      .a_scale = a_scale.typed_data(),
      .b = static_cast<const uint8_t*>(b.untyped_data()),
      .b_scale = b_scale.typed_data(),
      .out = out->untyped_data(),
      .batch = batch,
      .m = rows,
      .n = n,
      .k = k,
      .dtype = *dtype,
      .b_rows = b_rows,
  };
  return launch_status(kOp, launch_fp8_matmul(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp8Matmul, jax_dsa::fp8_matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
