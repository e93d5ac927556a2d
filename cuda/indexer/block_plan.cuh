// How the CTAs of the block-maximum kernel divide their work. A row is a query and a head. A work
// tile is `Tr::kRows` rows of one request. Blocks of keys count from the start of a query, so a
// work tile is processed once for each different start of its rows, with the keys from this start
// to the largest end. These keys are divided into units, each of whole blocks. The units of all
// work tiles, end to end, are divided into equal work ranges, one per CTA.
#pragma once

#include <climits>

#include "common/ptx.cuh"
#include "common/types.h"
#include "indexer/block_max.h"

namespace jax_dsa::indexer {

// The fixed cost of a span in units, for loading its queries.
inline constexpr int kSpanCost = 2;

// The work of one CTA, in units and fixed costs.
struct BlockWork {
  int64_t work_tile;  // index of the first work tile
  int64_t skip;       // how much of the first work tile belongs to an earlier CTA
  int64_t work;       // length of the range
};

// A half-open range of keys.
struct Span {
  int start, end;
  __device__ bool empty() const { return start >= end; }
};

// The keys of a unit, counted from the start of its span.
__device__ __forceinline__ Span unit_range(const BlockMaxParams& p, const Span& span, int unit) {
  const int first = unit * p.unit_keys;
  return {first, first + min(p.unit_keys, span.end - span.start - first)};
}

// Returns the keys that query `token` of the batch sees, of `keys` keys.
__device__ __forceinline__ Span seen_keys(const int32_t* starts, const int32_t* ends, int64_t token,
                                          int keys) {
  return {starts ? max(__ldg(starts + token), 0) : 0, min(__ldg(ends + token), keys)};
}
__device__ __forceinline__ Span seen_keys(const IndexerFwdParams& p, int64_t batch, int64_t query) {
  return seen_keys(p.starts, p.ends, batch * p.queries + query, static_cast<int>(p.keys));
}

// Returns the smallest start above `after` of the rows of a work tile, and the largest end of the
// rows that have this start; an empty span if there is none. Whole warps call it.
template <typename Tr>
__device__ __forceinline__ Span next_span(const IndexerFwdParams& p, int64_t batch, int64_t row,
                                          int after) {
  if (p.starts == nullptr && after >= 0) return {INT_MAX, 0};
  const int64_t last_row = min(row + Tr::kRows, p.queries * p.heads) - 1;
  const int64_t last = last_row / p.heads;
  Span own = {INT_MAX, 0};
#pragma unroll 2
  for (int64_t query = row / p.heads + threadIdx.x % 32; query <= last; query += 32) {
    const Span seen = seen_keys(p, batch, query);
    if (seen.empty() || seen.start <= after || seen.start > own.start) continue;
    own.end = seen.start < own.start ? seen.end : max(own.end, seen.end);
    own.start = seen.start;
  }
  const int start = __reduce_min_sync(~0u, own.start);
  return {start, static_cast<int>(__reduce_max_sync(~0u, own.start == start ? own.end : 0))};
}

__device__ __forceinline__ int span_cost(const BlockMaxParams& p, const Span& span) {
  return kSpanCost + (span.end - span.start - 1) / p.unit_keys + 1;
}

// Iterates over the spans of a work range.
template <typename Tr>
struct BlockWalk {
  const BlockMaxParams& p;
  int64_t work_tile, skip, left;
  int after = -1;      // start of the previous span of the work tile
  int64_t batch, row;  // request and first row of the current work tile
  Span span;           // the keys of the current work tile
  int first, last;     // the units of the span that belong to this CTA

  __device__ BlockWalk(const BlockMaxParams& p, const BlockWork& work)
      : p(p), work_tile(work.work_tile), skip(work.skip), left(work.work) {}

  __device__ bool next() {
    const int64_t per_batch = ceil_div(p.in.queries * p.in.heads, int64_t{Tr::kRows});
    while (left > 0) {
      batch = work_tile / per_batch;
      row = (work_tile - batch * per_batch) * Tr::kRows;
      span = next_span<Tr>(p.in, batch, row, after);
      if (span.empty()) {
        ++work_tile;
        after = -1;
        continue;
      }
      after = span.start;
      const int cost = span_cost(p, span);
      if (skip >= cost) {
        skip -= cost;
        continue;
      }
      const int end = static_cast<int>(min(skip + left, int64_t{cost}));
      left -= end - skip;
      first = max(static_cast<int>(skip) - kSpanCost, 0);
      last = max(end - kSpanCost, 0);
      skip = 0;
      if (first < last) return true;
    }
    return false;
  }
};

// Returns the cost of a work tile. Whole warps call it.
template <typename Tr>
__device__ int64_t work_tile_cost(const BlockMaxParams& p, int64_t work_tile, int64_t per_batch) {
  const int64_t batch = work_tile / per_batch, row = (work_tile - batch * per_batch) * Tr::kRows;
  int64_t cost = 0;
  for (int after = -1;;) {
    const Span span = next_span<Tr>(p.in, batch, row, after);
    if (span.empty()) return cost;
    cost += span_cost(p, span);
    after = span.start;
  }
}

// Finds the work range of this CTA. All threads call it.
template <typename Tr, typename Shared>
__device__ void find_block_work(const BlockMaxParams& p, Shared& shared) {
  constexpr int kWarps = Tr::kThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t per_batch = ceil_div(p.in.queries * p.in.heads, int64_t{Tr::kRows});
  const int64_t work_tiles = p.in.batch * per_batch,
                per_warp = ceil_div(work_tiles, int64_t{kWarps});
  const int64_t first = min(per_warp * warp, work_tiles);
  const int64_t last = min(first + per_warp, work_tiles);
  int64_t own = 0;
  for (int64_t i = first; i < last; ++i) own += work_tile_cost<Tr>(p, i, per_batch);
  if (lane == 0) shared.warp_sums[warp] = own;
  if (threadIdx.x == 0) shared.work = {0, 0, 0};
  __syncthreads();
  int64_t before = 0, total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += shared.warp_sums[i];
    total += shared.warp_sums[i];
  }
  const int64_t each = total / gridDim.x, more = total % gridDim.x, block = blockIdx.x;
  const int64_t begin = each * block + min(block, more);
  const int64_t work = each + (block < more ? 1 : 0);
  if (work > 0 && before <= begin && begin < before + own) {
    int64_t work_tile = first;
    for (;; ++work_tile) {
      const int64_t cost = work_tile_cost<Tr>(p, work_tile, per_batch);
      if (begin < before + cost) break;
      before += cost;
    }
    if (lane == 0) shared.work = {work_tile, begin - before, work};
  }
  __syncthreads();
}

}  // namespace jax_dsa::indexer
