// Attention under masks: softmax attention in which each query sees some of the keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

// A query sees a key if everything that is given lets it.
struct AttentionMask {
  // The half-open range of keys that a query sees: [batch, queries], or [queries] with
  // range_stride = 0; null for no bound.
  const int32_t* starts;
  const int32_t* ends;
  int64_t range_stride;
  // Queries see keys of their own segment: [batch, queries] and [batch, keys]; or both null.
  const int32_t* q_segments;
  const int32_t* kv_segments;
  // A map in tiles: of each tile -2 if it is empty, -1 if it is full, else its slot in `bits`.
  // `map_rows` has the map's row of each query, ascending by one from query to query.
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

// Biases of scores. In memory a row has `keys` rounded up to a multiple of 8; what comes after the
// last key is arbitrary.
struct AttentionBias {
  const void* x;    // [batch, heads, queries, keys]; null for none
  int64_t queries;  // 1 or all
  int batch;        // 1 or all
  int heads;        // 1, groups or heads
};

struct MaskedAttentionFwdParams {
  const void* q;    // [batch, queries, heads, dim]
  const void* k;    // [batch, keys, groups, dim]
  const void* v;    // [batch, keys, groups, value_dim]
  void* out;        // [batch, queries, heads, value_dim]
  float* lse;       // [batch, queries, heads]; natural logarithm
  void* workspace;  // masked_attention_fwd_workspace_bytes
  AttentionMask mask;
  AttentionBias bias;
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;      // a multiple of groups
  int groups;     // of keys
  int dim;        // a multiple of 8, up to 256
  int value_dim;  // likewise
  DType dtype;    // bf16 or f16, of everything but lse
  float scale;
  float softcap;  // 0 for none
};

struct MaskedAttentionBwdParams {
  const void* q;      // [batch, queries, heads, dim]
  const void* k;      // [batch, keys, groups, dim]
  const void* v;      // [batch, keys, groups, value_dim]
  const void* out;    // [batch, queries, heads, value_dim]
  const float* lse;   // [batch, queries, heads]
  const void* dout;   // like out
  const float* dlse;  // like lse
  void* dq;           // like q
  void* dk;           // like k
  void* dv;           // like v
  void* dbias;        // like the bias
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
  // Sums have one order, and gradients the same bits on every run. Not for biases that scores
  // share.
  bool deterministic;
};

int64_t masked_attention_bwd_workspace_bytes(const MaskedAttentionBwdParams& params);
cudaError_t launch_masked_attention_bwd(const MaskedAttentionBwdParams& params,
                                        cudaStream_t stream);

int64_t masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams& params);
cudaError_t launch_masked_attention_fwd(const MaskedAttentionFwdParams& params,
                                        cudaStream_t stream);

}  // namespace jax_dsa
