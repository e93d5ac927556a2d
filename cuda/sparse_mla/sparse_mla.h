// Sparse MLA: attention of every query over the rows of `kv` that its indices select.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "mla/layout.h"

namespace jax_dsa {

// A slot k of a row of indices counts if 0 <= index < min(keys, end) and k < topk_length.
struct SparseMlaFwdParams {
  const void* q;   // [batch, queries, heads, dim], bf16
  const void* kv;  // [batch, keys, groups, dim], bf16; a value is a row's first 512 elements
  const int32_t* indices;      // [batch, queries, groups, slots]
  const int32_t* ends;         // [batch, queries], or null: all keys are visible
  const int32_t* topk_length;  // [batch, queries], or null: all slots count
  const float* sinks;          // [batch, heads], or [heads] with sinks_stride = 0, or null
  void* out;                   // [batch, queries, heads, 512], bf16
  float* lse;                  // [batch, queries, heads]; natural logarithm, without the sink
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

// The gradients of the forward pass. With P = exp(scale * q . kv - lse):
//   delta = sum(out * dout) - dlse
//   dS = P (dout . v - delta) scale    dq = dS kv    dkv = dS^T q, and P^T dout in the values
// A sink's gate is a factor of `dout`.
struct SparseMlaBwdParams {
  const void* q;               // as in the forward pass, up to `topk_length`
  const void* kv;              //
  const int32_t* indices;      //
  const int32_t* ends;         //
  const int32_t* topk_length;  //
  const void* dout;            // [batch, queries, heads, 512], bf16
  const float* lse;            // [batch, queries, heads]
  const void* out;             // [batch, queries, heads, 512], bf16
  const float* dlse;           // [batch, queries, heads]
  void* dq;                    // [batch, queries, heads, dim], bf16
  // [batch, keys, groups, dim]: summed by reductions, in an order that differs from run to run,
  // columns at `sparse_mla_dkv_place`; or if by_rows, bit-identical on every run, columns in order:
  // the summands of `count` queries at a time, all batches' queries in a row, are stored as rows,
  // and then those of each key are added.
  float* dkv;
  void* rows;  // [count, groups, heads of a group over 128 (ceil), slots up to a multiple of 64,
               //  dim], bf16
  // [batch * queries, ... as `rows`]: of every `count` queries, their rows in the order of their
  // keys, those of no key last, by their places in `rows`; and those keys, in [batch, keys,
  // groups], plus batch * keys * groups + 1 for every `count` queries before.
  const int32_t* row_order;
  const uint32_t* row_key;
  void* counters;  // sparse_mla_bwd_counter_bytes
  void* images;    // sparse_mla_bwd_image_bytes, aligned to 16
  int32_t* order;  // sparse_mla_bwd_order_bytes; not touched if that is 0
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int64_t count;      // queries at a time, of all batches; if not by_rows, all
  int64_t first = 0;  // of those at hand
  int heads;          // a multiple of groups
  int groups;
  int slots;
  int dim;  // 576 or 512
  float scale;
  bool by_rows;
  // Where several queries are packed into one, which the launcher decides (bwd_pack.cuh): so many
  // bits below each index, one for every 8 heads, say for which of them the key is selected.
  int member_bits = 0;
};

// Where the backward kernel keeps a column of dkv: in every 16 columns, pairs 0 4 1 5 2 6 3 7, as
// lanes have them.
constexpr int sparse_mla_dkv_place(int column) {
  return column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

cudaError_t launch_sparse_mla_fwd(const SparseMlaFwdParams& params, cudaStream_t stream);

// Sizes of the backward pass's workspace, enough for every device, and how many rows a query has.
int64_t sparse_mla_bwd_counter_bytes(const SparseMlaBwdParams& params);
int64_t sparse_mla_bwd_query_rows(const SparseMlaBwdParams& params);
int64_t sparse_mla_bwd_image_bytes(const SparseMlaBwdParams& params);
int64_t sparse_mla_bwd_order_bytes(const SparseMlaBwdParams& params);

cudaError_t launch_sparse_mla_bwd(const SparseMlaBwdParams& params, cudaStream_t stream);

}  // namespace jax_dsa
