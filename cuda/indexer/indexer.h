// The lightning indexer: a score, called logit, for every pair of a query and a key.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"

namespace jax_dsa {

enum class IndexerDType { kBF16, kE4M3 };

inline constexpr int kIndexerMaxHeads = 64;
inline constexpr int kIndexerPageMultiple = 64;
inline constexpr int kIndexerDecodeQueries = 4;  // Up to so many queries use the decode kernel.

struct IndexerFwdParams {
  const void* q;          // [batch, queries, heads, channels], of `dtype`; 16-byte aligned
  const void* k;          // [batch, keys, channels], of `dtype`; 16-byte aligned
  const float* weights;   // [batch, queries, heads]
  const float* k_scale;   // [batch, keys], or null for 1
  const int32_t* starts;  // [batch, queries]; a query sees the keys start <= s < end
  const int32_t* ends;    // [batch, queries]
  float* out;             // [batch, queries, keys]; -inf for masked keys, see `whole_rows`
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;     // 1 .. 64
  int channels;  // 32, 64 or 128
  IndexerDType dtype;
  bool relu;
  // Whether every key outside a query's range gets -inf. If false, some of these are not written,
  // which suffices for a reader that stays within the ranges. Within the ranges, keys on unmapped
  // pages always get -inf.
  bool whole_rows;
  // With a page table, `keys` is pages_per_request * page_size, `k` has shape [pools, pages,
  // page_size, channels] and `k_scale` has shape [pools, pages, page_size]. The pages of a request
  // lie in its own pool, or in the only one.
  const int32_t* page_table;  // [batch, pages_per_request], or null; an entry outside 0 .. pages -
                              // 1 is unmapped
  int64_t pools;              // 1 or `batch`
  int pages;                  // pages per pool
  int64_t pages_per_request;
  int page_size;  // a multiple of kIndexerPageMultiple
};

// Returns whether the forward kernels can run this call, if its sizes are not 0.
inline bool is_valid(const IndexerFwdParams& p) {
  // The end of the last key tile must be below 2^31, too.
  return p.keys <= INT32_MAX - 4096 && p.heads >= 1 && p.heads <= kIndexerMaxHeads &&
         (p.page_table == nullptr ||
          (p.page_size > 0 && p.page_size % kIndexerPageMultiple == 0 && p.pages > 0 &&
           int64_t{p.pages} * p.page_size <= INT32_MAX - 4096 &&
           p.keys == p.pages_per_request * p.page_size));
}

cudaError_t launch_indexer_fwd(const IndexerFwdParams& params, cudaStream_t stream);

// Top-k of the logits. The workspace holds the logits of several batch entries, or of some queries
// of one entry, at a time.
struct IndexerTopkParams {
  IndexerFwdParams logits;  // `logits.out` is the workspace
  int64_t capacity;         // size of the workspace in floats, at least `keys`
  int32_t* indices;         // [batch, queries, k]
  float* values;            // [batch, queries, k]
  int64_t k;                // as in TopkParams
};

cudaError_t launch_indexer_topk(const IndexerTopkParams& params, cudaStream_t stream);

// Top-k of the logits inside candidate blocks. Blocks count from `starts`. The workspace holds the
// lists and logits of as many queries at a time as fit.
struct IndexerCandidatesParams {
  IndexerFwdParams logits;    // `out` and `whole_rows` are not used
  const int32_t* candidates;  // [batch, queries, slots]: numbers of blocks in any order; those that
                              // the query does not see, and negative ones, are ignored
  int64_t slots;
  int block_size;    // >= 1; there may be at most kIndexerMaxCandidateBlocks blocks
  float* workspace;  // [capacity]; 16-byte aligned
  int64_t capacity;  // at least indexer_candidates_row_words
  int32_t* indices;  // [batch, queries, k]
  float* values;     // [batch, queries, k]
  int64_t k;         // as in TopkParams
};

// The logits of keys that the caller names.
struct IndexerSelectedParams {
  IndexerFwdParams logits;  // `out` is [batch, queries, slots]; -inf in slots with an index outside
                            // 0 .. keys - 1. There is no page table, and no range is used.
  const int32_t* indices;   // [batch, queries, slots]
  int64_t slots;
};

cudaError_t launch_indexer_selected(const IndexerSelectedParams& params, cudaStream_t stream);

inline constexpr int64_t kIndexerMaxCandidateBlocks = int64_t{1} << 20;

// Returns the largest number of candidate keys of a query, rounded up to a multiple of 4.
constexpr int64_t indexer_candidate_keys(int64_t keys, int64_t slots, int64_t block_size) {
  return ((slots < keys / block_size + 1 ? slots * block_size : keys) + 3) / 4 * 4;
}

// Returns the size of the lists and logits of one query in 32-bit words.
constexpr int64_t indexer_candidates_row_words(int64_t keys, int64_t slots, int64_t block_size) {
  const int64_t blocks = (keys + block_size - 1) / block_size;
  return indexer_candidate_keys(keys, slots, block_size) + (slots < blocks ? slots : blocks) + 1;
}

cudaError_t launch_indexer_candidates(const IndexerCandidatesParams& params, cudaStream_t stream);

// A block of keys: its largest logit among the keys that a query sees, and the first key that has
// it. NaN counts as the largest.
struct alignas(8) BlockScore {
  float logit;
  int32_t key;
};

inline constexpr int64_t kIndexerMaxBlocks = 16384;  // per list

// Selection of blocks of keys. Blocks count from the start of a query, and their last one may have
// fewer keys. The workspaces hold the scores of some queries at a time.
struct IndexerBlockTopkParams {
  // Without `weights`, every head has a list of its own: its logits are q . k, after the optional
  // ReLU and times k_scale. `starts` may then be null for 0. With pages it must be, and the blocks
  // are multiples of 64 keys. With `weights`, the heads of a query have one list, and `logits.out`
  // is a workspace for the logits of `capacity` queries.
  IndexerFwdParams logits;
  BlockScore* scores;  // workspace for `capacity` queries: [queries, lists, blocks]
  int64_t capacity;
  int64_t block_size;    // 1 .. max(keys, 1)
  int64_t sink_blocks;   // The first blocks and the last blocks with a logit above -inf (or NaN)
  int64_t local_blocks;  // are selected before all others.
  int32_t* indices;      // [batch, queries, lists, k]: ascending numbers of blocks, then -1
  float* values;         // [batch, queries, lists, k]: their logits, then -inf
  int32_t* keys;         // [batch, queries, lists, k]: the keys that have these logits, then -1
  int64_t k;
};

// Returns the number of blocks of a list.
constexpr int64_t indexer_blocks(int64_t keys, int64_t block_size) {
  return (keys + block_size - 1) / block_size;
}

cudaError_t launch_indexer_block_topk(const IndexerBlockTopkParams& params, cudaStream_t stream);

// The same selection from logits that are in memory.
struct BlockTopkParams {
  const float* logits;    // [rows, keys]
  const int32_t* starts;  // [rows], from which the blocks of a row count, or null for 0
  const int32_t* ends;    // [rows]
  BlockScore* scores;     // workspace: [capacity, blocks]
  int64_t capacity;       // rows at a time
  int64_t rows;
  int64_t keys;
  int64_t block_size;  // as in IndexerBlockTopkParams
  int64_t sink_blocks, local_blocks;
  int32_t* indices;  // [rows, k]: ascending numbers of blocks, then -1
  int64_t k;
};

cudaError_t launch_block_topk(const BlockTopkParams& params, cudaStream_t stream);

inline constexpr int kIndexerBwdMaxSlots = 8192;

// Returns the size of `relu_mask` in 64-bit words for `tokens` = batch * queries.
constexpr int64_t indexer_bwd_relu_mask_words(int64_t tokens, int64_t slots) {
  return tokens * ((slots + 63) / 64 * 64);
}

// Backward pass for the logits of each query's selected keys. A slot is valid if 0 <= index < keys.
struct IndexerBwdParams {
  const void* q;           // [batch, queries, heads, channels], bf16; 16-byte aligned
  const void* k;           // [batch, keys, channels], bf16; 16-byte aligned
  const float* weights;    // [batch, queries, heads]
  const float* k_scale;    // [batch, keys], or null for 1
  const int32_t* indices;  // [batch, queries, slots]
  const float* grad;       // [batch, queries, slots]: dL / dlogits
  void* dq;                // [batch, queries, heads, channels], bf16
  float* dk;               // [batch, keys, channels]
  float* dweights;         // [batch, queries, heads]
  float* dk_scale;         // [batch, keys]; null if k_scale is
  uint64_t* relu_mask;     // workspace of indexer_bwd_relu_mask_words
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int slots;     // 0 .. kIndexerBwdMaxSlots
  int heads;     // 1 .. 64
  int channels;  // 32, 64 or 128
  bool relu;
};

// Returns whether the backward kernels of either tier can run this call.
inline bool is_valid(const IndexerBwdParams& p) {
  return p.keys <= INT32_MAX - 4096 && p.heads >= 1 && p.heads <= kIndexerMaxHeads &&
         p.slots >= 0 && p.slots <= kIndexerBwdMaxSlots &&
         (p.k_scale == nullptr) == (p.dk_scale == nullptr) &&
         (p.channels == 32 || p.channels == 64 || p.channels == 128);
}

cudaError_t launch_indexer_bwd(const IndexerBwdParams& params, cudaStream_t stream);

// The launchers of the tiers. Those of the forward pass get valid calls whose sizes are not 0.
namespace hopper {
cudaError_t launch_indexer_fwd(const IndexerFwdParams& params, cudaStream_t stream);
cudaError_t launch_indexer_bwd(const IndexerBwdParams& params, cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_indexer_fwd(const IndexerFwdParams& params, const Device& device,
                               cudaStream_t stream);
cudaError_t launch_indexer_bwd(const IndexerBwdParams& params, cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
