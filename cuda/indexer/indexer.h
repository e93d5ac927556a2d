// The lightning indexer: how much every query wants every key.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

enum class IndexerDType { kBF16, kE4M3 };

inline constexpr int kIndexerMaxHeads = 64;

struct IndexerFwdParams {
  const void* q;          // [batch, queries, heads, channels], of `dtype`; 16-byte aligned
  const void* k;          // [batch, keys, channels], of `dtype`; 16-byte aligned
  const float* weights;   // [batch, queries, heads]
  const float* k_scale;   // [batch, keys], or null: 1
  const int32_t* starts;  // [batch, queries]; a query sees the keys start <= s < end
  const int32_t* ends;    // [batch, queries]
  float* out;             // [batch, queries, keys]; -inf for the keys not seen
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;     // 1 .. 64
  int channels;  // 32, 64 or 128
  IndexerDType dtype;
  bool relu;
};

cudaError_t launch_indexer_fwd(const IndexerFwdParams& params, cudaStream_t stream);

}  // namespace jax_dsa
