// Handler of masked attention.

#include "masked_attention/masked_attention.h"

#include "ffi/common.h"
#include "ffi/masked_attention_operands.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], k [B, S, G, D], v [B, S, G, E], the seven of MaskOperands and the bias, each
// maybe absent
// -> out [B, T, N, E], lse [B, T, N]; then workspace
ffi::Error masked_attention_fwd(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                                ffi::AnyBuffer v, ffi::AnyBuffer starts, ffi::AnyBuffer ends,
                                ffi::AnyBuffer q_segments, ffi::AnyBuffer kv_segments,
                                ffi::AnyBuffer rows, ffi::AnyBuffer tiles, ffi::AnyBuffer bits,
                                ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out,
                                ffi::Result<ffi::Buffer<ffi::F32>> lse,
                                ffi::Result<ffi::Buffer<ffi::U8>> workspace, float scale,
                                float softcap) {
  constexpr const char* kOp = "masked_attention_fwd";
  MaskedAttentionFwdParams params = {};
  const MaskOperands mask = {starts, ends, q_segments, kv_segments, rows, tiles, bits};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, k, v, mask, bias, scale, softcap, &params));
  const int64_t batch = params.batch, queries = params.queries, heads = params.heads;
  DSA_FFI_RETURN_IF_ERROR(
      check_like_q(kOp, "out", *out, q, {batch, queries, heads, params.value_dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse->dimensions(), {}, {batch, queries, heads}));
  params.out = out->untyped_data();
  params.lse = lse->typed_data();
  params.workspace = workspace->untyped_data();
  if (static_cast<int64_t>(workspace->element_count()) <
      masked_attention_fwd_workspace_bytes(params)) {
    return invalid_argument(kOp, "the workspace is too small");
  }
  return launch_status(kOp, launch_masked_attention_fwd(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(MaskedAttentionFwd, jax_dsa::masked_attention_fwd,
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
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
