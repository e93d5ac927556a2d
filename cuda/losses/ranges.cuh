// The keys that queries see, start <= key < end, and the tiles of keys that these lie in.
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

// Tiles first..last have all keys that lie in low..high; none if first == last.
struct Tiles {
  int first, last;
  int low, high;
};

// What a query of a batch entry sees, nothing if there is no such query. Params have starts, ends,
// queries and keys.
template <typename Params>
__device__ __forceinline__ Range range_of(const Params& p, int64_t batch, int64_t query) {
  if (query >= p.queries) return {0, 0};
  const int64_t at = batch * p.queries + query;
  const int low = max(__ldg(p.starts + at), 0);
  const int high = min(__ldg(p.ends + at), static_cast<int>(p.keys));
  return low < high ? Range{low, high} : Range{0, 0};
}

// The key tiles that any of `count` <= 32 queries sees; called by whole warps.
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

// A block's items of `count` neighbouring queries that see a key, the last queries first and every
// other round backwards, so that under causality all blocks have about the same number of tiles.
struct QueryItems {
  int batch, query;  // of the item; its first query
  Tiles tiles;

  template <typename Params>
  __device__ bool next(const Params& p, int count) {
    const int per_batch = static_cast<int>(ceil_div(p.queries, int64_t{count}));
    const int items = static_cast<int>(p.batch) * per_batch, blocks = gridDim.x;
    for (; round * blocks < items; ++round) {
      const int own = round % 2 ? blocks - 1 - blockIdx.x : blockIdx.x;
      const int item = items - 1 - round * blocks - own;
      if (item < 0) continue;
      batch = item / per_batch;
      query = (item - batch * per_batch) * count;
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
