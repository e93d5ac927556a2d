// Handler of sparse MLA.

#include "sparse_mla/sparse_mla.h"

#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], ends [B, T]?, topk_length [B, T]?,
// sinks [B, N]?
// -> out [B, T, N, 512], max_logit and log_sum [B, T, N]
ffi::Error sparse_mla_fwd(cudaStream_t stream, BF16 q, BF16 kv, S32 indices, AnyBuffer ends,
                          AnyBuffer topk_length, AnyBuffer sinks, Result<BF16> out,
                          Result<F32> max_logit, Result<F32> log_sum, Attr<float, "scale"> scale) {
  constexpr const char* kOp = "sparse_mla_fwd";
  SparseMlaFwdParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, kv, indices, ends, topk_length, &params));
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  DSA_FFI_RETURN_IF_ERROR(read_results(kOp, *out, *max_logit, *log_sum, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  return launch_status(kOp, launch_sparse_mla_fwd(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.sparse_mla_fwd.v2", sparse_mla_fwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
