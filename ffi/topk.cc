// Handlers of top-k.

#include "topk/topk.h"

#include <algorithm>

#include "ffi/block_operands.h"
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

// logits [B, T, S], starts [B, T]?, ends [B, T] -> indices [B, T, K], and a workspace for the
// scores of N rows and M blocks [N, M, 2]
ffi::Error block_topk_fwd(cudaStream_t stream, F32 logits, AnyBuffer starts, S32 ends,
                          Result<S32> indices, Result<F32> scores,
                          Attr<int64_t, "block_size"> block_size,
                          Attr<int64_t, "sink_blocks"> sink_blocks,
                          Attr<int64_t, "local_blocks"> local_blocks) {
  constexpr const char* kOp = "block_topk_fwd";
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "logits", logits.dimensions(), {"B", "T", "S"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "indices", indices->dimensions(), {"B", "T", "K"}));
  const Dims leading = logits.dimensions().first(2);
  const int64_t keys = logits.dimensions()[2], k = indices->dimensions()[2];
  BlockTopkParams params = {
      .logits = logits.typed_data(),
      .ends = ends.typed_data(),
      .scores = reinterpret_cast<BlockScore*>(scores->typed_data()),
      .rows = leading[0] * leading[1],
      .keys = keys,
      .indices = indices->typed_data(),
      .k = k,
  };
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "starts", starts, DataType::S32,
                                        {leading[0], leading[1]}, &params.starts));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ends", ends.dimensions(), leading, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "indices", indices->dimensions(), leading, {k}));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "S", keys, 0, limits::topk::kMaxSize));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "B * T", params.rows, 0, limits::topk::kMaxRows));
  int64_t blocks;
  DSA_FFI_RETURN_IF_ERROR(read_blocks(kOp, keys, block_size, sink_blocks, local_blocks,
                                      limits::topk::kMaxBlocks, &params, &blocks));
  const int64_t row_scores = std::max<int64_t>(blocks, 1);
  DSA_FFI_RETURN_IF_ERROR(check_workspace(kOp, "scores", scores->size_bytes(), 8 * row_scores));
  params.capacity = static_cast<int64_t>(scores->element_count()) / (2 * row_scores);
  return launch_status(kOp, launch_block_topk(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.block_topk_fwd.v1", block_topk_fwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.topk_fwd.v3", topk_fwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
