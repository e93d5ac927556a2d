// Handlers of the indexer's losses.

#include "losses/losses.h"

#include "ffi/common.h"
#include "ffi/limits.h"

namespace jax_dsa {
namespace {

// Checks logits [B, T, K] against the limits of the kernels that process them row by row.
ffi::Error check_logits(const char* op, const char* name, Dims dims) {
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, name, dims, {"B", "T", "K"}));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "B * T", dims[0] * dims[1], 0, limits::losses::kMaxRows));
  return check_range(op, "K", dims[2], 0, limits::losses::kMaxSlots);
}

// logits and teacher [B, T, K], valid [B, T, K]?
// -> kl and counts [B, T], grad [B, T, K]: the gradient of each row's KL, times `share`
ffi::Error indexer_kl_loss_fwd(cudaStream_t stream, F32 logits, F32 teacher, AnyBuffer valid,
                               Result<F32> kl, Result<Bool> counts, Result<F32> grad,
                               Attr<float, "share"> share) {
  constexpr const char* kOp = "indexer_kl_loss_fwd";
  const Dims dims = logits.dimensions();
  DSA_FFI_RETURN_IF_ERROR(check_logits(kOp, "logits", dims));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "teacher", teacher.dimensions(), dims, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "kl", kl->dimensions(), {dims[0], dims[1]}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "counts", counts->dimensions(), {dims[0], dims[1]}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "grad", grad->dimensions(), dims, {}));
  KlRowsParams params = {};
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "valid", valid, DataType::PRED,
                                        {dims[0], dims[1], dims[2]}, &params.valid));
  params.logits = logits.typed_data();
  params.teacher = teacher.typed_data();
  params.kl = kl->typed_data();
  params.counts = counts->typed_data();
  params.grad = grad->typed_data();
  params.row_weight = share;
  params.rows = dims[0] * dims[1];
  params.slots = dims[2];
  return launch_status(kOp, launch_kl_rows(params, stream));
}

// grad [B, T, K], as the forward handler returns it, factor [B, T] -> out = grad * factor / share
ffi::Error indexer_kl_loss_bwd(cudaStream_t stream, F32 grad, F32 factor, Result<F32> out,
                               Attr<float, "share"> share) {
  constexpr const char* kOp = "indexer_kl_loss_bwd";
  const Dims dims = grad.dimensions();
  DSA_FFI_RETURN_IF_ERROR(check_logits(kOp, "grad", dims));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "factor", factor.dimensions(), {dims[0], dims[1]}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), dims, {}));
  const ScaleRowsParams params = {grad.typed_data(), factor.typed_data(), share,
                                  out->typed_data(), dims[0] * dims[1],   dims[2]};
  return launch_status(kOp, launch_scale_rows(params, stream));
}

// index_q [B, T, J, C], index_k [B, S, C], index_weights [B, T, J], index_k_scale [B, S]?,
// starts and ends [B, T], q [B, T, N, D], kv [B, S, G, D]
// -> kl [B], summed over the rows that count, rows [B], their number; dq, dk, dweights and
//    dk_scale?, the gradients of the first four operands in float32; workspace
ffi::Error dense_indexer_kl_loss_fwd(cudaStream_t stream, BF16 index_q, BF16 index_k,
                                     F32 index_weights, AnyBuffer index_k_scale, S32 starts,
                                     S32 ends, BF16 q, BF16 kv, Result<F32> kl, Result<S32> rows,
                                     Result<F32> dq, Result<F32> dk, Result<F32> dweights,
                                     Result<F32> dk_scale, Result<U8> workspace,
                                     Attr<bool, "relu"> relu, Attr<float, "scale"> scale) {
  constexpr const char* kOp = "dense_indexer_kl_loss_fwd";
  const Dims of_q = index_q.dimensions(), of_k = index_k.dimensions();
  const Dims of_heads = q.dimensions(), of_kv = kv.dimensions();
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "index_q", of_q, {"B", "T", "J", "C"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "index_k", of_k, {"B", "S", "C"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "q", of_heads, {"B", "T", "N", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "kv", of_kv, {"B", "S", "G", "D"}));
  const int64_t batch = of_q[0], queries = of_q[1], heads = of_q[2], channels = of_q[3];
  const int64_t keys = of_k[1], groups = of_kv[2], dim = of_heads[3];
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "S", keys, 0, limits::losses::kMaxSlots));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "T", queries, 0, limits::losses::kMaxSlots));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "N", of_heads[2], 0, limits::losses::kMaxSlots));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "J", heads, 1, limits::losses::kMaxIndexHeads));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(kOp, "C", channels, limits::losses::kChannels));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(kOp, "D", dim, limits::losses::kDims));
  DSA_FFI_RETURN_IF_ERROR(check_groups(kOp, of_heads[2], groups));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "index_k", of_k, {batch, keys, channels}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "index_weights", index_weights.dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "starts", starts.dimensions(), {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ends", ends.dimensions(), {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "q", of_heads, {batch, queries, of_heads[2], dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "kv", of_kv, {batch, keys, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "kl", kl->dimensions(), {batch}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "rows", rows->dimensions(), {batch}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dq", dq->dimensions(), of_q, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dk", dk->dimensions(), of_k, {}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "dweights", dweights->dimensions(), index_weights.dimensions(), {}));
  DenseLossParams params = {};
  IndexGradsParams& index = params.index;
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "index_k_scale", index_k_scale, DataType::F32,
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
  params.capacity = static_cast<int64_t>(workspace->size_bytes());
  DSA_FFI_RETURN_IF_ERROR(
      check_workspace(kOp, "workspace", params.capacity,
                      dense_loss_bytes(1, 1, keys, channels, params.teacher.heads)));
  return launch_status(kOp, launch_dense_loss(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.dense_indexer_kl_loss_fwd.v1", dense_indexer_kl_loss_fwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.indexer_kl_loss_bwd.v2", indexer_kl_loss_bwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.indexer_kl_loss_fwd.v2", indexer_kl_loss_fwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
