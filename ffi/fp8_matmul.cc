// Handler of the FP8 matmul.

#include <algorithm>

#include "ffi/common.h"
#include "ffi/limits.h"
#include "fp8/matmul.h"

namespace jax_dsa {
namespace {

// a [B, ..., K] e4m3, a_scale [B, ..., ceil(K / 128)], b [B, N, K] e4m3,
// b_scale [B, ceil(N / 128), ceil(K / 128)]
// -> out [B, ..., N], bfloat16, float16 or float32. K is a multiple of 16.
ffi::Error fp8_matmul(cudaStream_t stream, AnyBuffer a, F32 a_scale, AnyBuffer b, F32 b_scale,
                      Result<AnyBuffer> out) {
  constexpr const char* kOp = "fp8_matmul";
  namespace limits = ::jax_dsa::limits::fp8_matmul;
  const Dims a_dims = a.dimensions(), b_dims = b.dimensions();
  if (a_dims.size() < 2) {
    return invalid_argument(kOp,
                            "'a' has shape " + shape_string(a_dims) + ", expected (B, ..., K)");
  }
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "b", b_dims, {"B", "N", "K"}));
  DSA_FFI_RETURN_IF_ERROR(check_dtype(kOp, "a", a.element_type(), {DataType::F8E4M3FN}));
  DSA_FFI_RETURN_IF_ERROR(check_dtype(kOp, "b", b.element_type(), {DataType::F8E4M3FN}));
  DType dtype;
  DSA_FFI_RETURN_IF_ERROR(read_dtype(kOp, "out", out->element_type(), &dtype));
  const int64_t batch = a_dims[0], k = a_dims.back(), n = b_dims[1];
  const int64_t blocks = ceil_div(k, int64_t{128}), row_blocks = ceil_div(n, int64_t{128});
  const Dims leading = a_dims.first(a_dims.size() - 1);
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "a_scale", a_scale.dimensions(), leading, {blocks}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "b", b_dims, {batch, n, k}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "b_scale", b_scale.dimensions(), {batch, row_blocks, blocks}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), leading, {n}));
  DSA_FFI_RETURN_IF_ERROR(check_multiple(kOp, "K", k, limits::kRowBytes));
  int64_t rows = 1;
  for (size_t i = 1; i < leading.size(); ++i) rows *= leading[i];
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "the largest of B, the rows of 'a', N and K",
                                      std::max({batch, rows, n, k}), 0, limits::kMaxSize));
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
      .dtype = dtype,
  };
  return launch_status(kOp, launch_fp8_matmul(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.fp8_matmul.v1", fp8_matmul, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
