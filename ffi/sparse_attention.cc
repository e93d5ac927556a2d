// Handlers of sparse attention.

#include "sparse_attention/sparse_attention.h"

#include <algorithm>
#include <tuple>

#include "ffi/attention_operands.h"
#include "ffi/common.h"
#include "ffi/limits.h"
#include "ffi/sparse_mla_operands.h"

namespace jax_dsa {
namespace {

// Which blocks a query sees. All operands but the indices may be absent.
struct ListOperands {
  S32 indices;            // [B, T, G, K]
  AnyBuffer topk_length;  // [B, T], and so are the others
  AnyBuffer positions;
  AnyBuffer starts;
  AnyBuffer lengths;
  int block_size, sink_blocks, local_blocks;
  bool tail_block;
};

// Reads the lists after q, k and v.
template <typename Params>
ffi::Error read_lists(const char* op, const ListOperands& x, Params* params) {
  namespace limits = ::jax_dsa::limits::sparse_attention;
  constexpr int64_t kMax = ::jax_dsa::limits::kInt32Max;
  const Params& p = *params;
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "B * T", p.batch * p.queries, 0, limits::kMaxLength));
  SparseAttentionLists& lists = params->lists;
  const int64_t group_heads = p.groups > 0 ? p.heads / p.groups : 0;
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "N / G", group_heads, 0, limits::kMaxGroupHeads));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "block_size", x.block_size, limits::kBlockSizes));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "sink_blocks", x.sink_blocks, 0, kMax));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "local_blocks", x.local_blocks, 0, kMax));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "indices", x.indices.dimensions(), {"B", "T", "G", "K"}));
  const int64_t slots = x.indices.dimensions()[3];
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "K", slots, 0, kMax));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(op, "indices", x.indices.dimensions(), {p.batch, p.queries, p.groups, slots}));
  for (const auto& [name, from, to] :
       {std::tuple{"topk_length", &x.topk_length, &lists.topk_length},
        std::tuple{"positions", &x.positions, &lists.positions},
        std::tuple{"starts", &x.starts, &lists.starts},
        std::tuple{"lengths", &x.lengths, &lists.lengths}}) {
    DSA_FFI_RETURN_IF_ERROR(
        optional_data(op, name, *from, DataType::S32, {p.batch, p.queries}, to));
  }
  if (!present(x.positions) && (x.sink_blocks > 0 || x.local_blocks > 0 || x.tail_block)) {
    return invalid_argument(op, "forced blocks need 'positions'");
  }
  const int64_t blocks = (p.keys + x.block_size - 1) / x.block_size;
  const int64_t forced = std::min<int64_t>(x.sink_blocks, blocks) +
                         std::min<int64_t>(x.local_blocks, blocks) +
                         (x.tail_block && x.local_blocks == 0);
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "the number of slots, including forced blocks,",
                                      slots + forced, 0, limits::kMaxSlots));
  lists.indices = x.indices.typed_data();
  lists.slots = static_cast<int>(slots);
  lists.block_size = x.block_size;
  lists.sink_blocks = x.sink_blocks;
  lists.local_blocks = x.local_blocks;
  lists.tail_block = x.tail_block;
  return ffi::Error::Success();
}

// q [B, T, N, D], k [B, S, G, D], v [B, S, G, E], indices [B, T, G, K], topk_length, positions,
// starts and lengths [B, T]?, sinks [B, N]?
// -> out [B, T, N, E], max_logit [B, T, N], log_sum [B, T, N], workspace
ffi::Error sparse_attention_fwd(cudaStream_t stream, AnyBuffer q, AnyBuffer k, AnyBuffer v,
                                S32 indices, AnyBuffer topk_length, AnyBuffer positions,
                                AnyBuffer starts, AnyBuffer lengths, AnyBuffer sinks,
                                Result<AnyBuffer> out, Result<F32> max_logit, Result<F32> log_sum,
                                Result<U8> workspace, Attr<float, "scale"> scale,
                                Attr<int32_t, "block_size"> block_size,
                                Attr<int32_t, "sink_blocks"> sink_blocks,
                                Attr<int32_t, "local_blocks"> local_blocks,
                                Attr<bool, "tail_block"> tail_block) {
  constexpr const char* kOp = "sparse_attention_fwd";
  SparseAttentionFwdParams params = {};
  const ListOperands lists = {indices,    topk_length, positions,    starts,    lengths,
                              block_size, sink_blocks, local_blocks, tail_block};
  DSA_FFI_RETURN_IF_ERROR(read_qkv(kOp, q, k, v, &params));
  DSA_FFI_RETURN_IF_ERROR(read_lists(kOp, lists, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  DSA_FFI_RETURN_IF_ERROR(read_results(kOp, q, out, max_logit, log_sum, &params));
  params.workspace = workspace->untyped_data();
  DSA_FFI_RETURN_IF_ERROR(check_workspace(kOp, "workspace", workspace->size_bytes(),
                                          sparse_attention_fwd_workspace_bytes(params)));
  return launch_status(kOp, launch_sparse_attention_fwd(params, stream));
}

// q, k, v, indices, topk_length, positions, starts and lengths as above, out [B, T, N, E],
// max_logit [B, T, N], log_sum [B, T, N], dout [B, T, N, E], dlse [B, T, N]
// -> dq like q, dk and dv like k and v but float32, workspace
ffi::Error sparse_attention_bwd(cudaStream_t stream, AnyBuffer q, AnyBuffer k, AnyBuffer v,
                                S32 indices, AnyBuffer topk_length, AnyBuffer positions,
                                AnyBuffer starts, AnyBuffer lengths, AnyBuffer out, F32 max_logit,
                                F32 log_sum, AnyBuffer dout, F32 dlse, Result<AnyBuffer> dq,
                                Result<F32> dk, Result<F32> dv, Result<U8> workspace,
                                Attr<float, "scale"> scale, Attr<int32_t, "block_size"> block_size,
                                Attr<int32_t, "sink_blocks"> sink_blocks,
                                Attr<int32_t, "local_blocks"> local_blocks,
                                Attr<bool, "tail_block"> tail_block) {
  constexpr const char* kOp = "sparse_attention_bwd";
  SparseAttentionBwdParams params = {};
  const ListOperands lists = {indices,    topk_length, positions,    starts,    lengths,
                              block_size, sink_blocks, local_blocks, tail_block};
  DSA_FFI_RETURN_IF_ERROR(read_qkv(kOp, q, k, v, &params));
  DSA_FFI_RETURN_IF_ERROR(read_lists(kOp, lists, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  const int64_t batch = params.batch, queries = params.queries, heads = params.heads;
  const std::initializer_list<int64_t> like_out = {batch, queries, heads, params.value_dim};
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "out", out, q, like_out));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dout", dout, q, like_out));
  const std::initializer_list<int64_t> per_row = {batch, queries, heads};
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "max_logit", max_logit.dimensions(), per_row));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "log_sum", log_sum.dimensions(), per_row));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dlse", dlse.dimensions(), per_row));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(kOp, "dq", *dq, q, {batch, queries, heads, params.dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dk", dk->dimensions(), k.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dv", dv->dimensions(), v.dimensions(), {}));
  params.out = out.untyped_data();
  params.max_logit = max_logit.typed_data();
  params.log_sum = log_sum.typed_data();
  params.dout = dout.untyped_data();
  params.dlse = dlse.typed_data();
  params.dq = dq->untyped_data();
  params.dk = dk->typed_data();
  params.dv = dv->typed_data();
  params.workspace = workspace->untyped_data();
  DSA_FFI_RETURN_IF_ERROR(check_workspace(kOp, "workspace", workspace->size_bytes(),
                                          sparse_attention_bwd_workspace_bytes(params)));
  return launch_status(kOp, launch_sparse_attention_bwd(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.sparse_attention_fwd.v1", sparse_attention_fwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.sparse_attention_bwd.v1", sparse_attention_bwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
