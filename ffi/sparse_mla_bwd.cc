// Handler of sparse MLA's backward pass.

#include <algorithm>

#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], ends [B, T]?, topk_length [B, T]?,
// dout [B, T, N, 512], max_logit and log_sum [B, T, N], out [B, T, N, 512], dlse [B, T, N],
// row_order [B * T, R]? and row_key [B * T, R]?, uint32 (see sparse_mla.h)
// -> dq [B, T, N, D], dkv [B, S, G, D], and the workspaces counters, p_ds (P and dS tiles), order
// and rows [_, D]
//
// With row_order and row_key, dkv is a sum of stored rows, for as many queries at a time as `rows`
// has space for. Without them it is summed by atomic reductions, and its columns are in the order
// of sparse_mla_dkv_place.
ffi::Error sparse_mla_bwd(cudaStream_t stream, BF16 q, BF16 kv, S32 indices, AnyBuffer ends,
                          AnyBuffer topk_length, BF16 dout, F32 max_logit, F32 log_sum, BF16 out,
                          F32 dlse, AnyBuffer row_order, AnyBuffer row_key, Result<BF16> dq,
                          Result<F32> dkv, Result<U8> counters, Result<U8> p_ds, Result<S32> order,
                          Result<BF16> rows, Attr<float, "scale"> scale) {
  constexpr const char* kOp = "sparse_mla_bwd";
  SparseMlaBwdParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, kv, indices, ends, topk_length, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  const int64_t batch = params.batch, queries = params.queries, heads = params.heads;
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dout", dout.dimensions(),
                                      {batch, queries, heads, limits::sparse_mla::kValueDim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "max_logit", max_logit.dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "log_sum", log_sum.dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out.dimensions(), dout.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dlse", dlse.dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dq", dq->dimensions(), q.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dkv", dkv->dimensions(), kv.dimensions(), {}));
  params.dout = dout.untyped_data();
  params.max_logit = max_logit.typed_data();
  params.log_sum = log_sum.typed_data();
  params.out = out.untyped_data();
  params.dlse = dlse.typed_data();
  params.dq = dq->untyped_data();
  params.dkv = dkv->typed_data();
  params.rows = rows->untyped_data();
  params.counters = counters->untyped_data();
  params.p_ds = p_ds->untyped_data();
  params.order = order->typed_data();
  params.queries_at_once = batch * queries;
  params.by_rows = present(row_order);
  if (present(row_key) != params.by_rows) {
    return invalid_argument(kOp, "'row_order' and 'row_key' must be given together");
  }
  const int64_t query_rows = sparse_mla_bwd_query_rows(params);
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "row_order", row_order, DataType::S32,
                                        {params.queries_at_once, query_rows}, &params.row_order));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "row_key", row_key, DataType::U32,
                                        {params.queries_at_once, query_rows}, &params.row_key));
  if (params.by_rows && params.queries_at_once * query_rows > 0) {
    DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "rows", rows->dimensions(), {"rows", "D"}));
    const int64_t stored = rows->dimensions()[0];
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "rows", rows->dimensions(), {stored, params.dim}));
    DSA_FFI_RETURN_IF_ERROR(
        check_workspace(kOp, "rows", rows->size_bytes(), query_rows * params.dim * 2));
    params.queries_at_once = std::min(params.queries_at_once, stored / query_rows);
  }
  DSA_FFI_RETURN_IF_ERROR(check_workspace(kOp, "counters", counters->size_bytes(),
                                          sparse_mla_bwd_counter_bytes(params)));
  DSA_FFI_RETURN_IF_ERROR(
      check_workspace(kOp, "p_ds", p_ds->size_bytes(), sparse_mla_bwd_p_ds_bytes(params)));
  DSA_FFI_RETURN_IF_ERROR(
      check_workspace(kOp, "order", order->size_bytes(), sparse_mla_bwd_order_bytes(params)));
  return launch_status(kOp, launch_sparse_mla_bwd(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.sparse_mla_bwd.v3", sparse_mla_bwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
