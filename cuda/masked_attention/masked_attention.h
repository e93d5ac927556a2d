// Interface of masked attention: softmax attention in which each query sees a subset of the keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"
#include "common/types.h"

namespace jax_dsa {

// Describes which keys a query sees. A query sees a key if every condition that is given (not null)
// allows it.
struct AttentionMask {
  // The half-open range of keys that each query sees: [batch, queries], or [queries] with
  // range_stride = 0. Null means no bound.
  const int32_t* starts;
  const int32_t* ends;
  int64_t range_stride;
  // Segment ids, [batch, queries] and [batch, keys]. A query sees the keys of its own segment.
  // Either both are null or neither is.
  const int32_t* q_segments;
  const int32_t* kv_segments;
  // The block mask ("map"): each tile is -2 if it is empty, -1 if it is full, and otherwise its
  // slot in `bits`. `map_rows` holds the row of each query in the map; it increases by one from
  // query to query.
  const int32_t* map_rows;  // [batch, queries], or [queries] with map_rows_stride = 0; or null
  const int32_t* tiles;     // [map_batch, map_heads, tile_rows, tile_columns]
  const uint8_t* bits;      // [map_batch, map_heads, slots, block_q, block_k / 8], lowest bit first
  int64_t map_rows_stride;
  int64_t slots;
  int map_batch;  // 1 or batch
  int map_heads;  // 1, groups or heads
  int tile_rows, tile_columns;
  int block_q, block_k;  // block_k is a multiple of 128
};

// Biases that are added to the scores. In memory each row is padded to a multiple of 8 keys. The
// padding may hold anything.
struct AttentionBias {
  const void* x;    // [batch, heads, queries, keys]; null for none
  int64_t queries;  // 1 or `queries` of the call
  int batch;        // 1 or `batch` of the call
  int heads;        // 1, groups or heads
};

struct MaskedAttentionFwdParams {
  const void* q;  // [batch, queries, heads, dim]
  const void* k;  // [batch, keys, groups, dim]
  const void* v;  // [batch, keys, groups, value_dim]
  void* out;      // [batch, queries, heads, value_dim]
  // Per query and head, [batch, queries, heads]: the largest score, and the natural logarithm of
  // the sum of exp(score - max_logit). They are -inf and 0 for a query that sees no key.
  float* max_logit;
  float* log_sum;
  void* workspace;  // masked_attention_fwd_workspace_bytes
  // Logits without a value, [batch, heads], or [heads] with sinks_stride = 0. Null for none. They
  // change `out` only.
  const float* sinks;
  int64_t sinks_stride;
  AttentionMask mask;
  AttentionBias bias;
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;      // number of query heads, a multiple of groups
  int groups;     // number of KV heads
  int dim;        // a multiple of 8, up to 256
  int value_dim;  // a multiple of 8, up to 256
  DType dtype;    // bf16 or f16; the type of q, k, v, out and the bias
  float scale;
  float softcap;  // 0 for no softcap
};

struct MaskedAttentionBwdParams {
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
  void* dk;           // like k
  void* dv;           // like v
  void* dbias;        // like bias.x
  void* workspace;    // masked_attention_bwd_workspace_bytes, 16-byte aligned
  AttentionMask mask;
  AttentionBias bias;
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;
  int groups;
  int dim;
  int value_dim;
  DType dtype;
  float scale;
  float softcap;
  // If true, all sums have a fixed order and the gradients are bit-identical from run to run. Not
  // supported for biases that several scores share.
  bool deterministic;
};

int64_t masked_attention_bwd_workspace_bytes(const MaskedAttentionBwdParams& params);
cudaError_t launch_masked_attention_bwd(const MaskedAttentionBwdParams& params,
                                        cudaStream_t stream);

int64_t masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams& params);
cudaError_t launch_masked_attention_fwd(const MaskedAttentionFwdParams& params,
                                        cudaStream_t stream);

// The two tiers of these functions; tiers.cc chooses.
namespace hopper {
int64_t masked_attention_bwd_workspace_bytes(const MaskedAttentionBwdParams& params);
cudaError_t launch_masked_attention_bwd(const MaskedAttentionBwdParams& params,
                                        cudaStream_t stream);
int64_t masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams& params);
cudaError_t launch_masked_attention_fwd(const MaskedAttentionFwdParams& params,
                                        cudaStream_t stream);
}  // namespace hopper
namespace portable {
int64_t masked_attention_bwd_workspace_bytes(const MaskedAttentionBwdParams& params);
cudaError_t launch_masked_attention_bwd(const MaskedAttentionBwdParams& params,
                                        const Device& device, cudaStream_t stream);
int64_t masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams& params);
cudaError_t launch_masked_attention_fwd(const MaskedAttentionFwdParams& params,
                                        const Device& device, cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
