// Lists of the candidate keys of each query.
//
// The candidate keys of a query are numbered in ascending order, and its row of logits has one
// value per candidate key. `list_kernel` makes the list of a query's blocks, in which every block
// occurs once and in order. The logit of position i is that of key
//
//   list[i / block_size] + i % block_size.
//
// Ascending positions are ascending keys, so the top-k of a row breaks ties as the top-k of all
// logits does. `key_kernel` replaces the selected positions by keys.
#pragma once

#include "common/ptx.cuh"
#include "common/types.h"
#include "indexer/candidates.h"

namespace jax_dsa::indexer {

inline constexpr int kListThreads = 256;

struct ListShared {
  int warp_sums[kListThreads / 32];
  uint32_t is_candidate[1];  // one bit per block that the query sees
};

// Each CTA makes the list and the count of one query from `slots` numbers of blocks in any order.
__global__ void __launch_bounds__(kListThreads)
    list_kernel(const __grid_constant__ IndexerFwdParams p, const __grid_constant__ CandidateRows x,
                const int32_t* candidates, int64_t slots, int32_t* lists, int32_t* counts) {
  auto& shared = dynamic_shared<ListShared>();
  const int64_t row = blockIdx.x, token = x.first_token + row;
  const int thread = threadIdx.x, warp = thread / 32;
  const int start = max(__ldg(p.starts + token), 0);
  const int64_t end_key = min(int64_t{__ldg(p.ends + token)}, p.keys);
  const int seen = static_cast<int>(max(end_key - start, int64_t{0}));  // keys
  const int blocks = static_cast<int>(ceil_div(int64_t{seen}, int64_t{x.block_size}));
  const int words = ceil_div(blocks, 32);
  for (int i = thread; i < words; i += kListThreads) shared.is_candidate[i] = 0;
  __syncthreads();
  for (int64_t i = thread; i < slots; i += kListThreads) {
    const int block = __ldg(candidates + token * slots + i);
    if (block >= 0 && block < blocks) {
      atomicOr(&shared.is_candidate[block / 32], uint32_t{1} << block % 32);
    }
  }
  __syncthreads();
  const int words_each = ceil_div(words, kListThreads);
  const int begin = min(thread * words_each, words), end = min(begin + words_each, words);
  int count = 0;
  for (int i = begin; i < end; ++i) count += __popc(shared.is_candidate[i]);
  const int up_to = inclusive_scan(count);
  if (thread % 32 == 31) shared.warp_sums[warp] = up_to;
  __syncthreads();
  int at = up_to - count, total = 0;
  for (int w = 0; w < kListThreads / 32; ++w) {
    if (w < warp) at += shared.warp_sums[w];
    total += shared.warp_sums[w];
  }
  int32_t* const list = lists + row * x.list_size;
  for (int i = begin; i < end; ++i) {
    for (uint32_t word = shared.is_candidate[i]; word != 0; word &= word - 1) {
      list[at++] = start + (i * 32 + __ffs(word) - 1) * x.block_size;
    }
  }
  if (thread == 0) {
    // The query may not see all keys of its last block.
    const bool has_last =
        blocks > 0 && shared.is_candidate[(blocks - 1) / 32] >> (blocks - 1) % 32 & 1;
    const int64_t unseen = has_last ? int64_t{blocks} * x.block_size - seen : 0;
    counts[row] = static_cast<int>(int64_t{total} * x.block_size - unseen);
  }
}

// Replaces the selected positions of a row [k] by keys. Each CTA processes one row.
__global__ void __launch_bounds__(kListThreads)
    key_kernel(const __grid_constant__ CandidateRows x, int32_t* indices, int64_t k) {
  const int64_t row = blockIdx.x;
  const int32_t* const list = x.lists + row * x.list_size;
  for (int64_t i = threadIdx.x; i < k; i += kListThreads) {
    int32_t& index = indices[row * k + i];
    if (index >= 0) index = __ldg(list + index / x.block_size) + index % x.block_size;
  }
}

}  // namespace jax_dsa::indexer
