// Handler of attn_dist.

#include "attn_dist/attn_dist.h"

#include <limits>

#include "ffi/common.h"
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
  if (q.dimensions().size() != 4) return invalid_argument(kOp, "q is not of rank 4");
  if (kv.dimensions().size() != 4) return invalid_argument(kOp, "kv is not of rank 4");
  if (indices.dimensions().size() != 4) return invalid_argument(kOp, "indices is not of rank 4");
  const int64_t batch = q.dimensions()[0], queries = q.dimensions()[1], heads = q.dimensions()[2];
  const int64_t dim = q.dimensions()[3], keys = kv.dimensions()[1], groups = kv.dimensions()[2];
  const int64_t slots = indices.dimensions()[3];
  if (dim != 576 && dim != 512) return invalid_argument(kOp, "D is neither 576 nor 512");
  if (groups == 0 || heads % groups != 0) return invalid_argument(kOp, "N is no multiple of G");
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (heads > kMax || slots > kMax) return invalid_argument(kOp, "N or K exceeds 2^31 - 1");
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "kv", kv.dimensions(), {}, {batch, keys, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "indices", indices.dimensions(), {}, {batch, queries, groups, slots}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse.dimensions(), {}, {batch, queries, heads}));
  int64_t sums = 1;
  if (out->dimensions().size() == 4) {
    sums = out->dimensions()[1];
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "out", out->dimensions(), {}, {batch, sums, queries, slots}));
  } else {
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "out", out->dimensions(), {}, {batch, queries, slots}));
  }
  if (sums == 0 || sums % groups != 0 || heads % sums != 0) {
    return invalid_argument(kOp, "the number of sums is no multiple of G that divides N");
  }
  const int64_t sinks_batch = present(sinks) ? sinks.dimensions()[0] : 1;
  if (sinks_batch != 1 && sinks_batch != batch) {
    return invalid_argument(kOp, "sinks has another batch size than q");
  }
  AttnDistFwdParams params = {
      .q = q.untyped_data(),
      .kv = kv.untyped_data(),
      .indices = indices.typed_data(),
      .lse = lse.typed_data(),
      .out = out->typed_data(),
      .batch = batch,
      .queries = queries,
      .keys = keys,
      .heads = static_cast<int>(heads),
      .groups = static_cast<int>(groups),
      .head_group = static_cast<int>(heads / sums),
      .slots = static_cast<int>(slots),
      .dim = static_cast<int>(dim),
      .sinks_stride = static_cast<int>(sinks_batch == 1 ? 0 : heads),
      .scale = scale,
  };
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "ends", ends, ffi::DataType::S32, {batch, queries}, &params.ends));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "topk_length", topk_length, ffi::DataType::S32,
                                        {batch, queries}, &params.topk_length));
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "sinks", sinks, ffi::DataType::F32, {sinks_batch, heads}, &params.sinks));
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
