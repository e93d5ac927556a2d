// Handler of masked attention's backward pass.

#include "ffi/common.h"
#include "ffi/masked_attention_operands.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {
namespace {

// Whether the gradient of a bias element is a sum over several scores.
bool is_shared(const MaskedAttentionBwdParams& p) {
  const AttentionBias& b = p.bias;
  return b.batch != p.batch || b.heads != p.heads || b.queries != p.queries || b.queries == 1;
}

// q [B, T, N, D], k [B, S, G, D], v [B, S, G, E], the seven MaskOperands, bias?,
// out [B, T, N, E], max_logit [B, T, N], log_sum [B, T, N], dout [B, T, N, E], dlse [B, T, N]
// -> dq, dk, dv and dbias?, like q, k, v and bias; workspace
ffi::Error masked_attention_bwd(cudaStream_t stream, AnyBuffer q, AnyBuffer k, AnyBuffer v,
                                AnyBuffer starts, AnyBuffer ends, AnyBuffer q_segments,
                                AnyBuffer kv_segments, AnyBuffer rows, AnyBuffer tiles,
                                AnyBuffer bits, AnyBuffer bias, AnyBuffer out, F32 max_logit,
                                F32 log_sum, AnyBuffer dout, F32 dlse, Result<AnyBuffer> dq,
                                Result<AnyBuffer> dk, Result<AnyBuffer> dv, Result<AnyBuffer> dbias,
                                Result<U8> workspace, Attr<float, "scale"> scale,
                                Attr<float, "softcap"> softcap,
                                Attr<bool, "deterministic"> deterministic) {
  constexpr const char* kOp = "masked_attention_bwd";
  MaskedAttentionBwdParams params = {};
  const MaskOperands mask = {starts, ends, q_segments, kv_segments, rows, tiles, bits};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, k, v, mask, bias, scale, softcap, &params));
  const int64_t batch = params.batch, queries = params.queries, keys = params.keys;
  const int64_t heads = params.heads, groups = params.groups;
  const int64_t dim = params.dim, value_dim = params.value_dim;
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "out", out, q, {batch, queries, heads, value_dim}));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dout", dout, q, {batch, queries, heads, value_dim}));
  const std::initializer_list<int64_t> per_row = {batch, queries, heads};
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "max_logit", max_logit.dimensions(), per_row));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "log_sum", log_sum.dimensions(), per_row));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dlse", dlse.dimensions(), per_row));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dq", *dq, q, {batch, queries, heads, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dk", *dk, q, {batch, keys, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dv", *dv, q, {batch, keys, groups, value_dim}));
  if (present(bias)) {
    DSA_FFI_RETURN_IF_ERROR(check_bias(kOp, "dbias", *dbias, q, params));
    if (deterministic && is_shared(params)) {
      return invalid_argument(kOp,
                              "the gradient of a bias that several scores share is summed in no "
                              "fixed order, so deterministic must be false");
    }
  }
  params.out = out.untyped_data();
  params.max_logit = max_logit.typed_data();
  params.log_sum = log_sum.typed_data();
  params.dout = dout.untyped_data();
  params.dlse = dlse.typed_data();
  params.dq = dq->untyped_data();
  params.dk = dk->untyped_data();
  params.dv = dv->untyped_data();
  params.dbias = dbias->untyped_data();
  params.workspace = workspace->untyped_data();
  params.deterministic = deterministic;
  DSA_FFI_RETURN_IF_ERROR(check_workspace(kOp, "workspace", workspace->size_bytes(),
                                          masked_attention_bwd_workspace_bytes(params)));
  return launch_status(kOp, launch_masked_attention_bwd(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.masked_attention_bwd.v2", masked_attention_bwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
