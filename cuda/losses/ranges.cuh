// The range of keys that a query sees, start <= key < end, and the key tiles that contain it.
#pragma once

#include <climits>
#include <cstdint>

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/types.h"

namespace jax_dsa {

struct Range {
  int low, high;

  __device__ bool has(int key) const { return low <= key && key < high; }
};

// Tiles first .. last - 1 contain all keys low .. high - 1. If first == last, there are none.
struct Tiles {
  int first, last;
  int low, high;
};

// Returns the range of a query of a batch entry. It is empty if query >= p.queries. Params must
// have the members starts, ends, queries and keys.
template <typename Params>
__device__ __forceinline__ Range range_of(const Params& p, int64_t batch, int64_t query) {
  if (query >= p.queries) return {0, 0};
  const int64_t at = batch * p.queries + query;
  const int low = max(__ldg(p.starts + at), 0);
  const int high = min(__ldg(p.ends + at), static_cast<int>(p.keys));
  return low < high ? Range{low, high} : Range{0, 0};
}

// Returns the key tiles that at least one of `count` <= 32 queries sees. All lanes of a warp must
// call it.
template <typename Params>
__device__ __forceinline__ Tiles tiles_seen(const Params& p, int64_t batch, int64_t query,
                                            int count) {
  const int lane = threadIdx.x % 32;
  const Range own = lane < count ? range_of(p, batch, query + lane) : Range{0, 0};
  const bool any = own.low < own.high;
  const int low = __reduce_min_sync(~0u, any ? own.low : INT_MAX);
  const int high = __reduce_max_sync(~0u, any ? own.high : 0);
  return low < high ? Tiles{low / kTile, ceil_div(high, kTile), low, high} : Tiles{0, 0, 0, 0};
}

// Iterates over a CTA's work tiles, each of `count` neighbouring queries. Work tiles whose queries
// see no key are skipped. The last queries come first, and every other round assigns work tiles to
// CTAs in reverse order, so that under a causal mask all CTAs get about the same number of key
// tiles.
struct QueryWorkTiles {
  int batch, query;  // batch entry and first query of the current work tile
  Tiles tiles;

  template <typename Params>
  __device__ bool next(const Params& p, int count) {
    const int per_batch = static_cast<int>(ceil_div(p.queries, int64_t{count}));
    const int work_tiles = static_cast<int>(p.batch) * per_batch, ctas = gridDim.x;
    for (; round * ctas < work_tiles; ++round) {
      const int own = round % 2 ? ctas - 1 - blockIdx.x : blockIdx.x;
      const int work_tile = work_tiles - 1 - round * ctas - own;
      if (work_tile < 0) continue;
      batch = work_tile / per_batch;
      query = (work_tile - batch * per_batch) * count;
      tiles = tiles_seen(p, batch, query, count);
      if (tiles.first == tiles.last) continue;
      ++round;
      return true;
    }
    return false;
  }

 private:
  int round = 0;
};

}  // namespace jax_dsa
