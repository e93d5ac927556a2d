// Handler of attn_dist.

#include "attn_dist/attn_dist.h"

#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], lse [B, T, N], ends [B, T]?,
// topk_length [B, T]?, sinks [B, N]?
// -> out [B, H, T, K], sums of N / H heads; or [B, T, K], sums of all
ffi::Error attn_dist_fwd(cudaStream_t stream, ffi::Buffer<ffi::BF16> q, ffi::Buffer<ffi::BF16> kv,
                         ffi::Buffer<ffi::S32> indices, ffi::Buffer<ffi::F32> lse,
                         ffi::AnyBuffer ends, ffi::AnyBuffer topk_length, ffi::AnyBuffer sinks,
                         ffi::Result<ffi::Buffer<ffi::F32>> out, float scale) {
  constexpr const char* kOp = "attn_dist_fwd";
  AttnDistFwdParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, kv, indices, ends, topk_length, &params));
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  const int64_t batch = params.batch, queries = params.queries, slots = params.slots;
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "lse", lse.dimensions(), {}, {batch, queries, params.heads}));
  int64_t sums = 1;
  if (out->dimensions().size() == 4) {
    sums = out->dimensions()[1];
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "out", out->dimensions(), {}, {batch, sums, queries, slots}));
  } else {
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "out", out->dimensions(), {}, {batch, queries, slots}));
  }
  if (sums == 0 || sums % params.groups != 0 || params.heads % sums != 0) {
    return invalid_argument(kOp, "the number of sums is no multiple of G that divides N");
  }
  params.lse = lse.typed_data();
  params.out = out->typed_data();
  params.head_group = static_cast<int>(params.heads / sums);
  params.scale = scale;
  return launch_status(kOp, launch_attn_dist_fwd(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttnDistFwd, jax_dsa::attn_dist_fwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
