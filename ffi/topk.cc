// Handler of top-k.

#include "topk/topk.h"

#include <algorithm>

#include "ffi/common.h"
#include "ffi/limits.h"

namespace jax_dsa {
namespace {

// x [B, T, S], starts [B, T], ends [B, T] -> indices [B, T, K], values [B, T, K]?, and a workspace
ffi::Error topk_fwd(cudaStream_t stream, F32 x, S32 starts, S32 ends, Result<S32> indices,
                    Result<F32> values, Result<F32> workspace) {
  constexpr const char* kOp = "topk_fwd";
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "x", x.dimensions(), {"B", "T", "S"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "indices", indices->dimensions(), {"B", "T", "K"}));
  const Dims leading = x.dimensions().first(2);
  const int64_t rows = leading[0] * leading[1], size = x.dimensions()[2];
  const int64_t k = indices->dimensions()[2];
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "starts", starts.dimensions(), leading, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ends", ends.dimensions(), leading, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "indices", indices->dimensions(), leading, {k}));
  if (present(*values)) {
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "values", values->dimensions(), leading, {k}));
  }
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "min(K, S)", std::min(k, size), 0, limits::topk::kMaxSelected));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "S", size, 0, limits::topk::kMaxSize));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "B * T", rows, 0, limits::topk::kMaxRows));
  const TopkParams params = {
      .logits = x.typed_data(),
      .starts = starts.typed_data(),
      .ends = ends.typed_data(),
      .indices = indices->typed_data(),
      .values = present(*values) ? values->typed_data() : nullptr,
      .rows = rows,
      .size = size,
      .k = k,
      .workspace = workspace->typed_data(),
      .workspace_bytes = static_cast<int64_t>(workspace->size_bytes()),
  };
  return launch_status(kOp, launch_topk(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.topk_fwd.v3", topk_fwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
