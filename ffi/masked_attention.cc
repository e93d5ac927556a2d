// Handler of masked attention.

#include "masked_attention/masked_attention.h"

#include "ffi/common.h"
#include "ffi/masked_attention_operands.h"
#include "ffi/sparse_mla_operands.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], k [B, S, G, D], v [B, S, G, E], the seven MaskOperands, bias?,
// sinks [B, N]?
// -> out [B, T, N, E], max_logit [B, T, N], log_sum [B, T, N], workspace
ffi::Error masked_attention_fwd(cudaStream_t stream, AnyBuffer q, AnyBuffer k, AnyBuffer v,
                                AnyBuffer starts, AnyBuffer ends, AnyBuffer q_segments,
                                AnyBuffer kv_segments, AnyBuffer rows, AnyBuffer tiles,
                                AnyBuffer bits, AnyBuffer bias, AnyBuffer sinks,
                                Result<AnyBuffer> out, Result<F32> max_logit, Result<F32> log_sum,
                                Result<U8> workspace, Attr<float, "scale"> scale,
                                Attr<float, "softcap"> softcap) {
  constexpr const char* kOp = "masked_attention_fwd";
  MaskedAttentionFwdParams params = {};
  const MaskOperands mask = {starts, ends, q_segments, kv_segments, rows, tiles, bits};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, k, v, mask, bias, scale, softcap, &params));
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  DSA_FFI_RETURN_IF_ERROR(read_results(kOp, q, out, max_logit, log_sum, &params));
  params.workspace = workspace->untyped_data();
  DSA_FFI_RETURN_IF_ERROR(check_workspace(kOp, "workspace", workspace->size_bytes(),
                                          masked_attention_fwd_workspace_bytes(params)));
  return launch_status(kOp, launch_masked_attention_fwd(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.masked_attention_fwd.v2", masked_attention_fwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
