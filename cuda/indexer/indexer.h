// The lightning indexer: how much every query wants every key.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

enum class IndexerDType { kBF16, kE4M3 };

inline constexpr int kIndexerMaxHeads = 64;
inline constexpr int kIndexerPageMultiple = 64;
inline constexpr int kIndexerDecodeQueries = 4;  // of a request, have a kernel of their own

struct IndexerFwdParams {
  const void* q;          // [batch, queries, heads, channels], of `dtype`; 16-byte aligned
  const void* k;          // [batch, keys, channels], of `dtype`; 16-byte aligned
  const float* weights;   // [batch, queries, heads]
  const float* k_scale;   // [batch, keys], or null: 1
  const int32_t* starts;  // [batch, queries]; a query sees the keys start <= s < end
  const int32_t* ends;    // [batch, queries]
  float* out;             // [batch, queries, keys]; -inf for the keys not seen, see `whole_rows`
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;     // 1 .. 64
  int channels;  // 32, 64 or 128
  IndexerDType dtype;
  bool relu;
  // Whether all keys outside a query's range get -inf. Else some are not written: for who reads
  // `out` within the ranges only. A key on a page that is not there gets it within them.
  bool whole_rows;
  // With a page table `keys` is pages_per_request * page_size, `k` [pools, pages, page_size,
  // channels] and `k_scale` without the channels: a request's keys lie in pages of a pool, its own
  // or the only one.
  const int32_t* page_table;  // [batch, pages_per_request], or null; others than a page of the pool
                              // are not there
  int64_t pools;              // 1 or `batch`
  int pages;                  // of a pool
  int64_t pages_per_request;
  int page_size;  // a multiple of kIndexerPageMultiple
};

cudaError_t launch_indexer_fwd(const IndexerFwdParams& params, cudaStream_t stream);

// Top-k of the logits. Logits of whole batch entries or of a part of one entry's queries are in
// memory at a time.
struct IndexerTopkParams {
  IndexerFwdParams logits;  // `out` is the workspace
  int64_t capacity;         // of `out`, in words: `keys` or more
  int32_t* indices;         // [batch, queries, k]
  float* values;            // [batch, queries, k]
  int64_t k;                // as in TopkParams
};

cudaError_t launch_indexer_topk(const IndexerTopkParams& params, cudaStream_t stream);

inline constexpr int kIndexerBwdMaxSlots = 8192;

// The size of `gates` in words, for `tokens` (batch * queries) of so many slots each.
constexpr int64_t indexer_bwd_gates_words(int64_t tokens, int64_t slots) {
  return tokens * ((slots + 63) / 64 * 64);
}

// The gradients of the logits at each query's own selection of keys. A slot counts if
// 0 <= index < keys.
struct IndexerBwdParams {
  const void* q;           // [batch, queries, heads, channels], bf16; 16-byte aligned
  const void* k;           // [batch, keys, channels], bf16; 16-byte aligned
  const float* weights;    // [batch, queries, heads]
  const float* k_scale;    // [batch, keys], or null: 1
  const int32_t* indices;  // [batch, queries, slots]
  const float* grad;       // [batch, queries, slots]: dL / dlogits
  void* dq;                // [batch, queries, heads, channels], bf16
  float* dk;               // [batch, keys, channels]
  float* dweights;         // [batch, queries, heads]
  float* dk_scale;         // [batch, keys]; null if k_scale is
  uint64_t* gates;         // workspace of indexer_bwd_gates_words
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int slots;     // 0 .. kIndexerBwdMaxSlots
  int heads;     // 1 .. 64
  int channels;  // 32, 64 or 128
  bool relu;
};

cudaError_t launch_indexer_bwd(const IndexerBwdParams& params, cudaStream_t stream);

}  // namespace jax_dsa
