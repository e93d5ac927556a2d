// Interface of sparse attention over caches: a few new queries per request, each of which sees the
// blocks of cached keys that its KV heads list.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"
#include "common/limits.h"

namespace jax_dsa {

// At most so many CTAs, a cluster, divide the keys of a query and KV head.
inline constexpr int kSparseDecodeMaxSplits = kMaxClusterSize;

struct SparseAttentionDecodeParams {
  const void* q;          // [batch, queries, heads, dim], bf16
  const void* k;          // [pools * rows, groups, dim], bf16, or e4m3 if `fp8`. A pool has the
                          // rows of a request, or the pages of all requests
  const void* v;          // like k
  const float* k_scale;   // [pools * rows, groups]: factors of the keys, or null. Requires `fp8`
  const float* v_scale;   // the same for the values
  const int32_t* blocks;  // [batch, queries, groups, slots]: numbers of blocks
  const int32_t* ends;    // [batch, queries]: a query sees the keys before this position
  const float* sinks;     // [batch, heads], or [heads] with sinks_stride = 0, or null
  const int32_t* page_table;  // [batch, page_slots]: the pages of a request; any value outside
                              // 0..pages-1 means no page. Null: position = row
  void* out;                  // [batch, queries, heads, dim], bf16
  float* max_logit;           // [batch, queries, heads]; -inf for a row without a key
  float* log_sum;  // [batch, queries, heads]: log(sum(exp(score - max_logit))) without the sink; 0
                   // for a row without a key
  int64_t batch;
  int64_t queries;
  int64_t keys;        // positions per request
  int64_t batch_rows;  // rows from one request's first row to the next's; 0 if all requests share
                       // the rows
  int heads;           // a multiple of groups
  int groups;
  int dim;  // 64, 128 or 256
  int slots;
  int block_size;  // a power of two
  int pages;
  int page_size;
  int page_slots;
  int sinks_stride;
  float scale;
  bool fp8;
  bool batch_invariant;  // the division of keys does not depend on the other queries
  int splits = 0;        // CTAs that divide the keys of a list: 1, 2, 4, 8 or 16; 0 for the number
                         // that is estimated to be the fastest, or fixed for `batch_invariant`
};

inline bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

// Returns whether the kernels take these parameters.
inline bool is_valid(const SparseAttentionDecodeParams& p) {
  if (p.groups <= 0 || p.heads % p.groups != 0 || p.slots < 0) return false;
  if (!is_power_of_two(p.block_size)) return false;
  if (int64_t{p.slots} * p.block_size > INT32_MAX - 256) return false;
  if (p.batch * p.queries * p.heads > INT32_MAX || p.keys > INT32_MAX - p.block_size) return false;
  if (p.splits < 0 || p.splits > kSparseDecodeMaxSplits) return false;
  if (p.splits > 0 && !is_power_of_two(p.splits)) return false;
  if (!p.fp8 && (p.k_scale || p.v_scale)) return false;
  return p.page_table == nullptr ||
         (p.page_size > 0 && p.pages >= 0 && int64_t{p.pages} * p.page_size <= INT32_MAX);
}

cudaError_t launch_sparse_attention_decode(const SparseAttentionDecodeParams& params,
                                           cudaStream_t stream);

namespace hopper {
cudaError_t launch_sparse_attention_decode(const SparseAttentionDecodeParams& params,
                                           cudaStream_t stream);
}
// The portable kernel does not divide lists.
namespace portable {
cudaError_t launch_sparse_attention_decode(const SparseAttentionDecodeParams& params,
                                           const Device& device, cudaStream_t stream);
}

}  // namespace jax_dsa
