// Selection of blocks of keys by their scores, and the scores of blocks whose logits are in memory.
//
// A thread group of kWarps warps selects for one list. Every thread holds kVec scores as integers
// with the same order: forced blocks are above all others, and blocks that cannot be selected are
// 0. A bisection over these integers finds the k-th largest, with one count per step, and ends
// early at a value that exactly k blocks reach. Ties go to the first blocks. Prefix sums then give
// the places of the selected blocks, in ascending order.
#pragma once

#include <climits>

#include "common/ptx.cuh"
#include "common/types.h"
#include "indexer/block_plan.cuh"
#include "indexer/indexer.h"

namespace jax_dsa::indexer {

struct BlockSelectParams {
  const BlockScore* scores;  // [batch, queries, lists, blocks]; read within a query's range only
  const int32_t* starts;     // [batch, queries], or null for 0
  const int32_t* ends;       // [batch, queries]
  int32_t* indices;          // [batch, queries, lists, k]
  float* values;             // [batch, queries, lists, k], or null
  int32_t* keys;             // [batch, queries, lists, k], or null
  int64_t queries;           // those of all batch entries
  int64_t lists;             // per query
  int64_t blocks;
  int64_t k;
  int64_t block_size, sink_blocks, local_blocks;
  int size;  // number of keys
};

// Returns the number of blocks in a range of keys.
__device__ __forceinline__ int block_count(const BlockSelectParams& p, const Span& seen) {
  return seen.empty() ? 0 : static_cast<int>((seen.end - seen.start - 1) / p.block_size) + 1;
}

// The order of blocks: 0 for one that cannot be selected, then by logit, then forced ones.
inline constexpr uint32_t kForced = 0xff800001u;

__device__ __forceinline__ uint32_t order_of(float logit, bool forced) {
  const int bits = __float_as_int(logit), magnitude = bits & INT_MAX;
  if (forced) return kForced;
  if (isnan(logit) || logit == -INFINITY) return 0;
  // Infinity counts as the largest finite logit.
  const int key = bits < 0 ? -magnitude : min(magnitude, 0x7f7fffff);
  return static_cast<uint32_t>(key) ^ 0x80000000u;
}

template <int kWarps>
struct ThreadGroup {
  struct Shared {
    int sums[2][kWarps];
  };
  Shared& shared;
  int parity = 0;

  // Returns the sums over the warps before this one and over all warps. All lanes of a warp pass
  // the same number.
  __device__ int2 sum(int own) {
    if constexpr (kWarps == 1) return {0, own};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) shared.sums[parity][warp] = own;
    __syncthreads();
    const int x = lane < kWarps ? shared.sums[parity][lane] : 0;
    parity ^= 1;
    return {static_cast<int>(__reduce_add_sync(~0u, lane < warp ? x : 0)),
            static_cast<int>(__reduce_add_sync(~0u, x))};
  }
  // Returns the largest value that any warp passes.
  __device__ int largest(int own) {
    if constexpr (kWarps == 1) return own;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) shared.sums[parity][warp] = own;
    __syncthreads();
    const int x = shared.sums[parity][lane % kWarps];
    parity ^= 1;
    return __reduce_max_sync(~0u, x);
  }
};

// kLists thread groups of kWarps warps per CTA; more than one thread group only if kWarps is 1.
template <int kWarps, int kVec, int kLists>
__global__ void __launch_bounds__(32 * kWarps * kLists)
    block_select_kernel(const __grid_constant__ BlockSelectParams p) {
  static_assert(kWarps == 1 || kLists == 1);
  ThreadGroup<kWarps> group = {dynamic_shared<typename ThreadGroup<kWarps>::Shared>()};
  const int lane = threadIdx.x % 32, warp = kWarps == 1 ? 0 : threadIdx.x / 32;
  const int64_t list = int64_t{blockIdx.x} * kLists + (kWarps == 1 ? threadIdx.x / 32 : 0);
  if (list >= p.queries * p.lists) return;
  const int count = block_count(p, seen_keys(p.starts, p.ends, list / p.lists, p.size));
  const BlockScore* const scores = p.scores + list * p.blocks;
  const int first = warp * (32 * kVec) + lane;  // Value v of this thread is block first + 32 v.

  float logits[kVec];
  int last = -1;  // the last block with a visible key
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    const int block = first + 32 * v;
    logits[v] = block < count ? __ldg(&scores[block].logit) : -INFINITY;
    if (logits[v] != -INFINITY) last = block;
  }
  last = group.largest(__reduce_max_sync(~0u, last));
  uint32_t order[kVec];
  uint32_t least = UINT_MAX, most = 0;  // of the blocks that can be selected
  int own = 0;
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    const int block = first + 32 * v;
    const bool seen = logits[v] != -INFINITY;
    order[v] =
        order_of(logits[v], seen && (block > last - p.local_blocks || block < p.sink_blocks));
    most = max(most, order[v]);
    if (order[v] > 0) least = min(least, order[v]);
    own += order[v] > 0;
  }
  const int available = group.sum(__reduce_add_sync(~0u, own)).y;
  const int wanted = static_cast<int>(min(p.k, static_cast<int64_t>(available)));

  // Blocks above `cut` are selected, and the first `ties` of those that equal it.
  uint32_t cut = 0;
  int ties = 0;
  if (wanted < available && wanted > 0) {
    // At least `wanted` blocks reach `low`, and fewer reach `high`.
    uint32_t low = __reduce_min_sync(~0u, least), high = __reduce_max_sync(~0u, most);
    high = static_cast<uint32_t>(group.largest(static_cast<int>(high ^ 0x80000000u))) ^ 0x80000000u;
    low =
        ~(static_cast<uint32_t>(group.largest(static_cast<int>(~low ^ 0x80000000u))) ^ 0x80000000u);
    ++high;
    int above = 0;  // how many reach `high`
    bool exact = false;
#pragma unroll 1
    while (high - low > 1 && !exact) {
      const uint32_t middle = low + (high - low) / 2;
      int reached = 0;
#pragma unroll
      for (int v = 0; v < kVec; ++v) reached += order[v] >= middle;
      reached = group.sum(__reduce_add_sync(~0u, reached)).y;
      exact = reached == wanted;
      if (reached >= wanted) {
        low = middle;
      } else {
        high = middle;
        above = reached;
      }
    }
    cut = exact ? low - 1 : low;
    ties = exact ? 0 : wanted - above;
  } else if (wanted == 0) {
    cut = UINT_MAX;
  }

  // Count the warp's blocks above the cut, and those that equal it, to find where they begin.
  int own_above = 0, own_tied = 0;
  if constexpr (kWarps > 1) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      own_above += order[v] > cut;
      own_tied += order[v] == cut;
    }
    own_above = __reduce_add_sync(~0u, own_above);
    own_tied = __reduce_add_sync(~0u, own_tied);
  }
  int tied = group.sum(own_tied).x;
  int place = group.sum(own_above).x + min(tied, ties);
  const int64_t out = list * p.k;
  const unsigned lower = (1u << lane) - 1;
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    const unsigned is_tied = __ballot_sync(~0u, order[v] == cut);
    const bool selected =
        order[v] > cut || (order[v] == cut && tied + __popc(is_tied & lower) < ties);
    const unsigned all = __ballot_sync(~0u, selected);
    if (selected) {
      const int block = first + 32 * v;
      const int64_t at = out + place + __popc(all & lower);
      p.indices[at] = block;
      if (p.values) p.values[at] = logits[v];
      if (p.keys) p.keys[at] = scores[block].key;
    }
    tied += __popc(is_tied);
    place += __popc(all);
  }
  for (int64_t i = wanted + warp * 32 + lane; i < p.k; i += 32 * kWarps) {
    p.indices[out + i] = -1;
    if (p.values) p.values[out + i] = -INFINITY;
    if (p.keys) p.keys[out + i] = -1;
  }
}

// Finds the score of every block of every query. A warp takes one block after the other.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    block_scores_kernel(const __grid_constant__ BlockSelectParams p, const float* logits,
                        BlockScore* scores) {
  const int lane = threadIdx.x % 32;
  constexpr int kWarps = kThreads / 32;
  const int64_t warps = int64_t{gridDim.x} * kWarps, items = p.queries * p.blocks;
  for (int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; item < items;
       item += warps) {
    const int64_t query = item / p.blocks, block = item - query * p.blocks;
    const Span seen = seen_keys(p.starts, p.ends, query, p.size);
    if (block >= block_count(p, seen)) continue;
    const int64_t first = seen.start + block * p.block_size;
    const int64_t last = min(first + p.block_size, static_cast<int64_t>(seen.end));
    const float* const row = logits + query * p.size;
    float best = -INFINITY;
    int key = INT_MAX;
#pragma unroll 4
    for (int64_t s = first + lane; s < last; s += 32) {
      const float x = row[s];
      if (!isnan(best) && !(x <= best)) best = x, key = static_cast<int>(s);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      const float other = __shfl_xor_sync(~0u, best, d);
      const int other_key = __shfl_xor_sync(~0u, key, d);
      const bool greater = isnan(other) ? !isnan(best) : other > best;
      const bool equal = isnan(other) ? isnan(best) : other == best;
      if (greater || (equal && other_key < key)) best = other, key = other_key;
    }
    if (lane == 0) scores[item] = {best, key};
  }
}

}  // namespace jax_dsa::indexer
