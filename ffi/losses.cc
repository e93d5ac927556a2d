// Handlers of the indexer's losses.

#include "losses/losses.h"

#include <limits>

#include "ffi/common.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

using BF16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using Bool = ffi::Buffer<ffi::PRED>;

// logits and teacher [B, T, K], valid [B, T, K]?
// -> KL and counts [B, T], gradient times the share [B, T, K]
ffi::Error indexer_kl_loss_fwd(cudaStream_t stream, F32 logits, F32 teacher, ffi::AnyBuffer valid,
                               ffi::Result<F32> kl, ffi::Result<Bool> counts, ffi::Result<F32> grad,
                               float share) {
  constexpr const char* kOp = "indexer_kl_loss_fwd";
  const auto dims = logits.dimensions();
  if (dims.size() != 3) return invalid_argument(kOp, "logits is not of rank 3");
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "teacher", teacher.dimensions(), dims, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "kl", kl->dimensions(), {}, {dims[0], dims[1]}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "counts", counts->dimensions(), {}, {dims[0], dims[1]}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "grad", grad->dimensions(), dims, {}));
  KlRowsParams params = {};
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "valid", valid, ffi::DataType::PRED,
                                        {dims[0], dims[1], dims[2]}, &params.valid));
  params.logits = logits.typed_data();
  params.teacher = teacher.typed_data();
  params.kl = kl->typed_data();
  params.counts = counts->typed_data();
  params.grad = grad->typed_data();
  params.share = share;
  params.rows = dims[0] * dims[1];
  params.slots = dims[2];
  return launch_status(kOp, launch_kl_rows(params, stream));
}

// gradient [B, T, K] of each row's KL times the share, factor [B, T]
// -> their product over the share
ffi::Error indexer_kl_loss_bwd(cudaStream_t stream, F32 grad, F32 factor, ffi::Result<F32> out,
                               float share) {
  constexpr const char* kOp = "indexer_kl_loss_bwd";
  const auto dims = grad.dimensions();
  if (dims.size() != 3) return invalid_argument(kOp, "the gradient is not of rank 3");
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "factor", factor.dimensions(), {}, {dims[0], dims[1]}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), dims, {}));
  const ScaleRowsParams params = {grad.typed_data(), factor.typed_data(), share,
                                  out->typed_data(), dims[0] * dims[1],   dims[2]};
  return launch_status(kOp, launch_scale_rows(params, stream));
}

// index_q [B, T, J, C], index_k [B, S, C], index_weights [B, T, J], index_k_scale [B, S]?, starts
// and ends [B, T], q [B, T, N, D], kv [B, S, G, D]
// -> KL and rows [B], gradients in f32 of the first four, workspace in bytes
ffi::Error dense_indexer_kl_loss_fwd(cudaStream_t stream, BF16 index_q, BF16 index_k,
                                     F32 index_weights, ffi::AnyBuffer index_k_scale, S32 starts,
                                     S32 ends, BF16 q, BF16 kv, ffi::Result<F32> kl,
                                     ffi::Result<S32> rows, ffi::Result<F32> dq,
                                     ffi::Result<F32> dk, ffi::Result<F32> dweights,
                                     ffi::Result<F32> dk_scale,
                                     ffi::Result<ffi::Buffer<ffi::U8>> workspace, bool relu,
                                     float scale) {
  constexpr const char* kOp = "dense_indexer_kl_loss_fwd";
  const auto of_q = index_q.dimensions(), of_k = index_k.dimensions();
  const auto of_heads = q.dimensions(), of_kv = kv.dimensions();
  if (of_q.size() != 4) return invalid_argument(kOp, "index_q is not of rank 4");
  if (of_k.size() != 3) return invalid_argument(kOp, "index_k is not of rank 3");
  if (of_heads.size() != 4) return invalid_argument(kOp, "q is not of rank 4");
  if (of_kv.size() != 4) return invalid_argument(kOp, "kv is not of rank 4");
  const int64_t batch = of_q[0], queries = of_q[1], heads = of_q[2], channels = of_q[3];
  const int64_t keys = of_k[1], groups = of_kv[2], dim = of_heads[3];
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 16384;
  if (keys > kMost || queries > kMost || of_heads[2] > kMost) {
    return invalid_argument(kOp, "T, S or N is too large");
  }
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "index_k", of_k, {}, {batch, keys, channels}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "index_weights", index_weights.dimensions(), {}, {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "starts", starts.dimensions(), {}, {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ends", ends.dimensions(), {}, {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "q", of_heads, {}, {batch, queries, of_heads[2], dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "kv", of_kv, {}, {batch, keys, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "kl", kl->dimensions(), {}, {batch}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "rows", rows->dimensions(), {}, {batch}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dq", dq->dimensions(), of_q, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dk", dk->dimensions(), of_k, {}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "dweights", dweights->dimensions(), index_weights.dimensions(), {}));
  DenseLossParams params = {};
  IndexGradsParams& index = params.index;
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "index_k_scale", index_k_scale, ffi::DataType::F32,
                                        {batch, keys}, &index.k_scale));
  if (present(index_k_scale)) {
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "dk_scale", dk_scale->dimensions(), index_k_scale.dimensions(), {}));
    index.dk_scale = dk_scale->typed_data();
  }
  index.q = index_q.untyped_data();
  index.k = index_k.untyped_data();
  index.weights = index_weights.typed_data();
  index.starts = starts.typed_data();
  index.ends = ends.typed_data();
  index.dq = dq->typed_data();
  index.dk = dk->typed_data();
  index.dweights = dweights->typed_data();
  index.batch = batch, index.queries = queries, index.keys = keys;
  index.heads = static_cast<int>(heads), index.channels = static_cast<int>(channels);
  index.relu = relu;
  params.teacher.q = q.untyped_data();
  params.teacher.kv = kv.untyped_data();
  params.teacher.heads = static_cast<int>(of_heads[2]);
  params.teacher.groups = static_cast<int>(groups);
  params.teacher.dim = static_cast<int>(dim);
  params.teacher.scale = scale;
  params.kl = kl->typed_data();
  params.rows = rows->typed_data();
  params.workspace = workspace->untyped_data();
  params.capacity = static_cast<int64_t>(workspace->element_count());
  return launch_status(kOp, launch_dense_loss(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(IndexerKlLossFwd, jax_dsa::indexer_kl_loss_fwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<jax_dsa::F32>()
                                  .Arg<jax_dsa::F32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::Bool>()
                                  .Ret<jax_dsa::F32>()
                                  .Attr<float>("share"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(IndexerKlLossBwd, jax_dsa::indexer_kl_loss_bwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<jax_dsa::F32>()
                                  .Arg<jax_dsa::F32>()
                                  .Ret<jax_dsa::F32>()
                                  .Attr<float>("share"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseIndexerKlLossFwd, jax_dsa::dense_indexer_kl_loss_fwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::F32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jax_dsa::S32>()
                                  .Arg<jax_dsa::S32>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::BF16>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::S32>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<bool>("relu")
                                  .Attr<float>("scale"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
