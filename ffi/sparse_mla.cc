// Handlers of sparse MLA.

#include "sparse_mla/sparse_mla.h"

#include "ffi/common.h"
#include "ffi/sparse_mla_shape.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], ends [B, T]?, topk_length [B, T]?, sinks
// [B, N]?
// -> out [B, T, N, 512], lse [B, T, N]
ffi::Error sparse_mla_fwd(cudaStream_t stream, ffi::Buffer<ffi::BF16> q, ffi::Buffer<ffi::BF16> kv,
                          ffi::Buffer<ffi::S32> indices, ffi::AnyBuffer ends,
                          ffi::AnyBuffer topk_length, ffi::AnyBuffer sinks,
                          ffi::Result<ffi::Buffer<ffi::BF16>> out,
                          ffi::Result<ffi::Buffer<ffi::F32>> lse, float scale) {
  constexpr const char* kOp = "sparse_mla_fwd";
  SparseMlaShape shape;
  DSA_FFI_RETURN_IF_ERROR(
      SparseMlaShape::read(kOp, q.dimensions(), kv.dimensions(), indices.dimensions(), &shape));
  if (!(scale > 0.f)) return invalid_argument(kOp, "the scale is not positive");
  const int64_t batch = shape.batch, queries = shape.queries, heads = shape.heads;
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), {},
                                      {batch, queries, heads, int64_t{kSparseMlaValueDim}}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse->dimensions(), {}, {batch, queries, heads}));
  const int64_t sinks_batch = present(sinks) ? sinks.dimensions()[0] : 1;
  if (sinks_batch != 1 && sinks_batch != batch) {
    return invalid_argument(kOp, "sinks has another batch size than q");
  }
  SparseMlaFwdParams params = {
      .q = q.untyped_data(),
      .kv = kv.untyped_data(),
      .indices = indices.typed_data(),
      .out = out->untyped_data(),
      .lse = lse->typed_data(),
      .batch = shape.batch,
      .queries = shape.queries,
      .keys = shape.keys,
      .heads = shape.heads,
      .groups = shape.groups,
      .slots = shape.slots,
      .dim = shape.dim,
      .sinks_stride = static_cast<int>(sinks_batch == 1 ? 0 : heads),
      .scale = scale,
  };
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "ends", ends, ffi::DataType::S32, {batch, queries}, &params.ends));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "topk_length", topk_length, ffi::DataType::S32,
                                        {batch, queries}, &params.topk_length));
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "sinks", sinks, ffi::DataType::F32, {sinks_batch, heads}, &params.sinks));
  return launch_status(kOp, launch_sparse_mla_fwd(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseMlaFwd, jax_dsa::sparse_mla_fwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
