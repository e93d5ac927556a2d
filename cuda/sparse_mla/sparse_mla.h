// Sparse MLA: attention of every query over the rows of `kv` that its indices select.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

inline constexpr int kSparseMlaValueDim = 512;

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

cudaError_t launch_sparse_mla_fwd(const SparseMlaFwdParams& params, cudaStream_t stream);

}  // namespace jax_dsa
