// Sparse MLA: attention of every query to the rows of `kv` that its indices select.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"
#include "mla/layout.h"

namespace jax_dsa {

// Slot k of a row of indices is valid if 0 <= index < min(keys, end) and k < topk_length.
struct SparseMlaFwdParams {
  const void* q;   // [batch, queries, heads, dim], bf16
  const void* kv;  // [batch, keys, groups, dim], bf16; a value is the first 512 elements of a row
  const int32_t* indices;      // [batch, queries, groups, slots]
  const int32_t* ends;         // [batch, queries], or null: all keys are visible
  const int32_t* topk_length;  // [batch, queries], or null: all slots are valid
  const float* sinks;          // [batch, heads], or [heads] with sinks_stride = 0, or null
  void* out;                   // [batch, queries, heads, 512], bf16
  // Both are [batch, queries, heads]. The log-sum-exp of the scores, without the sink, is their
  // sum. `max_logit` is a score next to the largest one, at most log(2^8) smaller; -inf for a row
  // without a valid slot, where `log_sum` is 0.
  float* max_logit;
  float* log_sum;  // log(sum(exp(score - max_logit)))
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;  // a multiple of groups
  int groups;
  int slots;
  int dim;  // 576 or 512
  int sinks_stride;
  float scale;  // > 0
};

// The gradients of the forward pass. With P = exp((scale * q . kv - max_logit) - log_sum):
//   delta = sum(out * dout) - dlse
//   dS = P (dout . v - delta) scale    dq = dS kv    dkv = dS^T q, plus P^T dout in the values
// The gate of a sink must already be a factor of `dout`.
struct SparseMlaBwdParams {
  const void* q;  // this and the next four as in the forward pass
  const void* kv;
  const int32_t* indices;
  const int32_t* ends;
  const int32_t* topk_length;
  const void* dout;        // [batch, queries, heads, 512], bf16
  const float* max_logit;  // [batch, queries, heads]; the results of the forward pass
  const float* log_sum;
  const void* out;    // [batch, queries, heads, 512], bf16
  const float* dlse;  // [batch, queries, heads]
  void* dq;           // [batch, queries, heads, dim], bf16
  // [batch, keys, groups, dim]. Without by_rows, dkv is summed by atomic reductions in an order
  // that differs from run to run, and columns are permuted by `sparse_mla_dkv_place`. With by_rows,
  // dkv is bit-identical on every run and columns are in order: `queries_at_once` queries at a
  // time, counted across the batch, first store their summands as rows, and then the rows of each
  // key are added.
  float* dkv;
  // [queries_at_once, groups, ceil(heads per group / 128), slots rounded up to 64, dim], bf16
  void* rows;
  // Both have the shape [batch * queries, ... as `rows` without dim]. For every `queries_at_once`
  // queries, row_order lists the rows (as positions in `rows`) in the order of their keys, rows
  // without a key last. row_key has their keys, as positions in [batch, keys, groups], plus batch *
  // keys * groups + 1 for every `queries_at_once` queries before.
  const int32_t* row_order;
  const uint32_t* row_key;
  void* counters;  // sparse_mla_bwd_counter_bytes bytes
  void* p_ds;      // P and dS tiles: sparse_mla_bwd_p_ds_bytes bytes, aligned to 16
  int32_t* order;  // sparse_mla_bwd_order_bytes bytes; not accessed if that is 0
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int64_t queries_at_once;  // queries at a time, across the batch; all of them without by_rows
  int64_t first_query = 0;  // first of the queries that are being processed
  int heads;                // a multiple of groups
  int groups;
  int slots;
  int dim;  // 576 or 512
  float scale;
  bool by_rows;
  // The launcher sets this where it packs several queries into one (bwd_pack.cuh). Then each index
  // is followed by this many lower bits, one for every 8 heads, which say whether these heads have
  // selected the key.
  int head_mask_bits = 0;
};

// Returns where the backward kernel keeps a column of dkv: every 16 columns are stored as the pairs
// 0 4 1 5 2 6 3 7, the order in which lanes hold them.
constexpr int sparse_mla_dkv_place(int column) {
  return column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

cudaError_t launch_sparse_mla_fwd(const SparseMlaFwdParams& params, cudaStream_t stream);

// Returns the number of stored rows of a query.
inline int64_t sparse_mla_bwd_query_rows(const SparseMlaBwdParams& p) {
  const int heads = p.groups > 0 ? p.heads / p.groups : 0;
  return int64_t{p.groups} * (heads > 128 ? (heads + 127) / 128 : 1) * ((p.slots + 63) / 64 * 64);
}

// Sizes of the backward pass's workspace, sufficient for every device.
int64_t sparse_mla_bwd_counter_bytes(const SparseMlaBwdParams& params);
int64_t sparse_mla_bwd_p_ds_bytes(const SparseMlaBwdParams& params);
int64_t sparse_mla_bwd_order_bytes(const SparseMlaBwdParams& params);

cudaError_t launch_sparse_mla_bwd(const SparseMlaBwdParams& params, cudaStream_t stream);

namespace hopper {
cudaError_t launch_sparse_mla_fwd(const SparseMlaFwdParams& params, cudaStream_t stream);
int64_t sparse_mla_bwd_counter_bytes(const SparseMlaBwdParams& params);
int64_t sparse_mla_bwd_p_ds_bytes(const SparseMlaBwdParams& params);
int64_t sparse_mla_bwd_order_bytes(const SparseMlaBwdParams& params);
cudaError_t launch_sparse_mla_bwd(const SparseMlaBwdParams& params, cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_sparse_mla_fwd(const SparseMlaFwdParams& params, const Device& device,
                                  cudaStream_t stream);
cudaError_t launch_sparse_mla_bwd(const SparseMlaBwdParams& params, const Device& device,
                                  cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
