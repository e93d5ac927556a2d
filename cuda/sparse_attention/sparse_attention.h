// Interface of sparse attention: softmax attention of every query to the blocks of keys that its
// group of heads lists.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"
#include "common/types.h"

namespace jax_dsa {

// Slots of a query, including those of forced blocks, at most.
inline constexpr int kSparseAttentionMaxSlots = 16384;

// Describes which keys a query and a KV head see. Block j of a query consists of block_size rows of
// k, from `starts` + j * block_size on. Slot i of a list counts if i < topk_length and if its block
// has a key that the query sees. A block that several slots name counts several times.
struct SparseAttentionLists {
  const int32_t* indices;      // [batch, queries, groups, slots]: numbers of blocks
  const int32_t* topk_length;  // [batch, queries], or null: all slots count
  // Position of each query among its keys, [batch, queries]. It sees no later key. Null: not
  // causal, and no block is forced.
  const int32_t* positions;
  const int32_t* starts;   // [batch, queries]: the row of k at position 0; null for 0
  const int32_t* lengths;  // [batch, queries]: keys from position 0 on; null for all rows of k
  int slots;
  int block_size;  // 1, 4, 16, 32, 64 or 128
  // Blocks that every query sees, beside its slots. One that a slot names counts as often as it is
  // named. With c = position / block_size: the first `sink_blocks` blocks; blocks c - local_blocks
  // + 1 to c; and block c if `tail_block` and if keys of it come after the query.
  int sink_blocks;
  int local_blocks;
  bool tail_block;
};

struct SparseAttentionFwdParams {
  const void* q;  // [batch, queries, heads, dim]
  const void* k;  // [batch, keys, groups, dim]
  const void* v;  // [batch, keys, groups, value_dim]
  void* out;      // [batch, queries, heads, value_dim]
  // Per query and head, [batch, queries, heads]: the largest score, and the natural logarithm of
  // the sum of exp(score - max_logit). They are -inf and 0 for a query that sees no key.
  float* max_logit;
  float* log_sum;
  void* workspace;  // sparse_attention_fwd_workspace_bytes, 16-byte aligned
  // Logits without a value, [batch, heads], or [heads] with sinks_stride = 0. Null for none. They
  // change `out` only.
  const float* sinks;
  int64_t sinks_stride;
  SparseAttentionLists lists;
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;      // number of query heads, a multiple of groups
  int groups;     // number of KV heads
  int dim;        // a multiple of 8, up to 256
  int value_dim;  // a multiple of 8, up to 256
  DType dtype;    // bf16 or f16; the type of q, k, v and out
  float scale;    // positive
};

struct SparseAttentionBwdParams {
  const void* q;    // [batch, queries, heads, dim]
  const void* k;    // [batch, keys, groups, dim]
  const void* v;    // [batch, keys, groups, value_dim]
  const void* out;  // [batch, queries, heads, value_dim]
  // The results of the forward pass, [batch, queries, heads]. Probabilities are exp(score -
  // max_logit - log_sum). With sinks, the caller adds to log_sum what the sink takes.
  const float* max_logit;
  const float* log_sum;
  const void* dout;   // like out
  const float* dlse;  // like log_sum: the gradient of log_sum
  void* dq;           // like q
  float* dk;          // [batch, keys, groups, dim]
  float* dv;          // [batch, keys, groups, value_dim]
  void* workspace;    // sparse_attention_bwd_workspace_bytes, 16-byte aligned
  SparseAttentionLists lists;
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;
  int groups;
  int dim;
  int value_dim;
  DType dtype;
  float scale;  // positive
};

int64_t sparse_attention_fwd_workspace_bytes(const SparseAttentionFwdParams& params);
cudaError_t launch_sparse_attention_fwd(const SparseAttentionFwdParams& params,
                                        cudaStream_t stream);

// All sums have a fixed order, so the gradients are bit-identical from run to run.
int64_t sparse_attention_bwd_workspace_bytes(const SparseAttentionBwdParams& params);
cudaError_t launch_sparse_attention_bwd(const SparseAttentionBwdParams& params,
                                        cudaStream_t stream);

namespace hopper {
cudaError_t launch_sparse_attention_fwd(const SparseAttentionFwdParams& params,
                                        cudaStream_t stream);
cudaError_t launch_sparse_attention_bwd(const SparseAttentionBwdParams& params,
                                        cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_sparse_attention_fwd(const SparseAttentionFwdParams& params,
                                        const Device& device, cudaStream_t stream);
cudaError_t launch_sparse_attention_bwd(const SparseAttentionBwdParams& params,
                                        const Device& device, cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
