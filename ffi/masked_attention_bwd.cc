// Handler of masked attention's backward pass.

#include "ffi/common.h"
#include "ffi/masked_attention_operands.h"
#include "ffi/targets.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], k [B, S, G, D], v [B, S, G, E], the seven of MaskOperands and the bias, each
// maybe absent;
// out [B, T, N, E], lse [B, T, N], dout [B, T, N, E], dlse [B, T, N]
// -> dq, dk, dv, dbias, like q, k, v and the bias; then workspace
ffi::Error masked_attention_bwd(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                                ffi::AnyBuffer v, ffi::AnyBuffer starts, ffi::AnyBuffer ends,
                                ffi::AnyBuffer q_segments, ffi::AnyBuffer kv_segments,
                                ffi::AnyBuffer rows, ffi::AnyBuffer tiles, ffi::AnyBuffer bits,
                                ffi::AnyBuffer bias, ffi::AnyBuffer out, ffi::Buffer<ffi::F32> lse,
                                ffi::AnyBuffer dout, ffi::Buffer<ffi::F32> dlse,
                                ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                                ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dbias,
                                ffi::Result<ffi::Buffer<ffi::U8>> workspace, float scale,
                                float softcap, bool deterministic) {
  constexpr const char* kOp = "masked_attention_bwd";
  MaskedAttentionBwdParams params = {};
  const MaskOperands mask = {starts, ends, q_segments, kv_segments, rows, tiles, bits};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, k, v, mask, bias, scale, softcap, &params));
  const int64_t batch = params.batch, queries = params.queries, keys = params.keys;
  const int64_t heads = params.heads, groups = params.groups;
  const int64_t dim = params.dim, value_dim = params.value_dim;
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "out", out, q, {batch, queries, heads, value_dim}));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dout", dout, q, {batch, queries, heads, value_dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse.dimensions(), {}, {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dlse", dlse.dimensions(), {}, {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dq", *dq, q, {batch, queries, heads, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dk", *dk, q, {batch, keys, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dv", *dv, q, {batch, keys, groups, value_dim}));
  if (present(bias)) DSA_FFI_RETURN_IF_ERROR(check_bias(kOp, "dbias", *dbias, q, params));
  params.out = out.untyped_data();
  params.lse = lse.typed_data();
  params.dout = dout.untyped_data();
  params.dlse = dlse.typed_data();
  params.dq = dq->untyped_data();
  params.dk = dk->untyped_data();
  params.dv = dv->untyped_data();
  params.dbias = dbias->untyped_data();
  params.workspace = workspace->untyped_data();
  params.deterministic = deterministic;
  if (static_cast<int64_t>(workspace->element_count()) <
      masked_attention_bwd_workspace_bytes(params)) {
    return invalid_argument(kOp, "the workspace is too small");
  }
  return launch_status(kOp, launch_masked_attention_bwd(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(MaskedAttentionBwd, jax_dsa::masked_attention_bwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<bool>("deterministic"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
