// Handler of sparse attention over caches.

#include "ffi/common.h"
#include "ffi/limits.h"
#include "ffi/sparse_mla_operands.h"
#include "sparse_attention/decode.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D]; k and v [B, S, G, D], or [1, S, G, D] shared by all requests, bfloat16 or
// float8_e4m3fn; with a page table [B or 1, P * page_size, G, D]; blocks [B, T, G, K], ends [B, T],
// sinks [B, N]?, page_table [B, R]?, k_scale and v_scale like k without the last axis, for FP8 only
// -> out [B, T, N, D], max_logit and log_sum [B, T, N]
ffi::Error sparse_attention_decode(cudaStream_t stream, BF16 q, AnyBuffer k, AnyBuffer v,
                                   S32 blocks, S32 ends, AnyBuffer sinks, AnyBuffer page_table,
                                   AnyBuffer k_scale, AnyBuffer v_scale, Result<BF16> out,
                                   Result<F32> max_logit, Result<F32> log_sum,
                                   Attr<float, "scale"> scale,
                                   Attr<int32_t, "block_size"> block_size,
                                   Attr<int32_t, "page_size"> page_size,
                                   Attr<bool, "batch_invariant"> batch_invariant) {
  constexpr const char* kOp = "sparse_attention_decode";
  namespace limits = ::jax_dsa::limits::sparse_attention;
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "q", q.dimensions(), {"B", "T", "N", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "k", k.dimensions(), {"B or 1", "S", "G", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "blocks", blocks.dimensions(), {"B", "T", "G", "K"}));
  const int64_t batch = q.dimensions()[0], queries = q.dimensions()[1], heads = q.dimensions()[2];
  const int64_t dim = q.dimensions()[3], pools = k.dimensions()[0], rows = k.dimensions()[1];
  const int64_t groups = k.dimensions()[2], slots = blocks.dimensions()[3];
  DSA_FFI_RETURN_IF_ERROR(
      check_dtype(kOp, "k", k.element_type(), {DataType::BF16, DataType::F8E4M3FN}));
  DSA_FFI_RETURN_IF_ERROR(check_dtype(kOp, "v", v.element_type(), {k.element_type()}));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(kOp, "the batch size of 'k'", pools, {1, batch}));
  DSA_FFI_RETURN_IF_ERROR(check_groups(kOp, heads, groups));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(kOp, "D", dim, limits::kDecodeDims));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "k", k.dimensions(), {pools, rows, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "v", v.dimensions(), {pools, rows, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "blocks", blocks.dimensions(), {batch, queries, groups, slots}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ends", ends.dimensions(), {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "B * T * N", batch * queries * heads, 0, limits::kMaxDecodeRows));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(kOp, "block_size", block_size, limits::kBlockSizes));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "K", slots, 0, limits::kMaxDecodeKeys / block_size));
  SparseAttentionDecodeParams params = {};
  params.batch = batch;
  params.queries = queries;
  params.heads = static_cast<int>(heads);
  params.groups = static_cast<int>(groups);
  params.dim = static_cast<int>(dim);
  params.slots = static_cast<int>(slots);
  params.block_size = block_size;
  params.keys = rows;
  params.batch_rows = pools == 1 ? 0 : rows;
  params.scale = scale;
  params.fp8 = k.element_type() == DataType::F8E4M3FN;
  params.batch_invariant = batch_invariant;
  if (!params.fp8 && (present(k_scale) || present(v_scale))) {
    return invalid_argument(kOp, "'k_scale' and 'v_scale' are for FP8 caches only");
  }
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "k_scale", k_scale, DataType::F32,
                                        {pools, rows, groups}, &params.k_scale));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "v_scale", v_scale, DataType::F32,
                                        {pools, rows, groups}, &params.v_scale));
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  DSA_FFI_RETURN_IF_ERROR(read_page_table(kOp, "k", page_table, rows, page_size, &params));
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "the number of keys of a request", params.keys, 0, limits::kMaxDecodeKeys));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), {batch, queries, heads, dim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "max_logit", max_logit->dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "log_sum", log_sum->dimensions(), {batch, queries, heads}));
  params.q = q.untyped_data();
  params.k = k.untyped_data();
  params.v = v.untyped_data();
  params.blocks = blocks.typed_data();
  params.ends = ends.typed_data();
  params.out = out->untyped_data();
  params.max_logit = max_logit->typed_data();
  params.log_sum = log_sum->typed_data();
  return launch_status(kOp, launch_sparse_attention_decode(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.sparse_attention_decode.v1", sparse_attention_decode, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
