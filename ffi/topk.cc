// Handler of top-k.

#include "topk/topk.h"

#include <algorithm>

#include "ffi/common.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

// x [B, T, S] f32, starts, ends [B, T] int32 -> indices [B, T, K] int32, and values [B, T, K] f32
// if there is a second result
ffi::Error topk_fwd(cudaStream_t stream, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> starts,
                    ffi::Buffer<ffi::S32> ends, ffi::Result<ffi::Buffer<ffi::S32>> indices,
                    ffi::RemainingRets optional) {
  constexpr const char* kOp = "topk_fwd";
  const auto dims = x.dimensions();
  if (dims.size() == 0) return invalid_argument(kOp, "x is a scalar");
  const auto leading = dims.first(dims.size() - 1);
  const int64_t size = dims.back();
  const auto out_dims = indices->dimensions();
  if (out_dims.size() == 0) return invalid_argument(kOp, "indices is a scalar");
  const int64_t k = out_dims.back();
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "starts", starts.dimensions(), leading, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ends", ends.dimensions(), leading, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "indices", out_dims, leading, {k}));
  float* values = nullptr;
  if (optional.size() > 1) return invalid_argument(kOp, "has more than two results");
  if (optional.size() == 1) {
    const auto result = optional.get<ffi::Buffer<ffi::F32>>(0);
    if (result.has_error()) return result.error();
    ffi::Result<ffi::Buffer<ffi::F32>> buffer = result.value();
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "values", buffer->dimensions(), leading, {k}));
    values = buffer->typed_data();
  }
  if (std::min(k, size) > kTopkMaxSelected) {
    return invalid_argument(kOp, "min(k, S) is " + std::to_string(std::min(k, size)) +
                                     ", at most " + std::to_string(kTopkMaxSelected));
  }
  if (size > kTopkMaxSize) {
    return invalid_argument(
        kOp, "S is " + std::to_string(size) + ", at most " + std::to_string(kTopkMaxSize));
  }
  int64_t rows = 1;
  for (const int64_t n : leading) rows *= n;
  const TopkParams params = {
      .logits = x.typed_data(),
      .starts = starts.typed_data(),
      .ends = ends.typed_data(),
      .indices = indices->typed_data(),
      .values = values,
      .rows = rows,
      .size = size,
      .k = k,
  };
  return launch_status(kOp, launch_topk(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopkFwd, jax_dsa::topk_fwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingRets(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
