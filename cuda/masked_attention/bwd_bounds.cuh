// Which queries see a tile of keys, for the masked attention backward kernel.
#pragma once

#include "masked_attention/mask.cuh"

namespace jax_dsa::masked_attention {

// Of the keys of an item: 128 or 64 of one group.
struct alignas(16) KeyBounds {
  uint32_t unseen[kKeyTile / 32];  // a bit for each key that no query of the group sees
  int first, stop;                 // all tiles of queries that see any; none if first >= stop
  int weight;                      // how many they are, of all heads that have maps of their own
};

inline constexpr int kKeyBoundsThreads = 128;

// Which of the 32 keys from `first` on lie in start..end.
__device__ __forceinline__ uint32_t range_bits(int start, int end, int first) {
  return low_bits(max(end, 0) - first) & ~low_bits(max(start, 0) - first);
}

// A warp takes an item.
template <int kKeys>
__global__ void __launch_bounds__(kKeyBoundsThreads, 1)
    key_bounds_kernel(const __grid_constant__ AttentionMask m,
                      const __grid_constant__ Bounds bounds, int64_t items, int64_t queries,
                      int keys, int heads, int groups, KeyBounds* result) {
  constexpr int kWords = kKeys / 32;
  const int lane = threadIdx.x % 32;
  const int64_t item = int64_t{blockIdx.x} * (kKeyBoundsThreads / 32) + threadIdx.x / 32;
  if (item >= items) return;
  const int key_tiles = ceil_div(keys, kKeys);
  const int query_tiles = static_cast<int>(ceil_div(queries, int64_t{kQueryTile}));
  const int64_t pair = item / key_tiles, entry = pair / groups;
  const int tile = static_cast<int>(item - pair * key_tiles), key = tile * kKeys;
  const int per_group = heads / groups;
  const int head = static_cast<int>(pair - entry * groups) * per_group;
  const int maps = m.map_rows && m.map_heads > groups ? per_group : 1;  // of the group's heads
  const QueryBounds* const q = bounds.queries + entry * query_tiles;
  const SegmentBounds* const segments =
      bounds.segments ? bounds.segments + entry * ceil_div(keys, kKeyTile) : nullptr;
  const bool ranges_only = !m.map_rows && !m.q_segments;

  int first = INT_MAX, stop = 0, weight = 0;
  uint32_t unseen[kWords] = {};
  for (int n = lane; n < maps * query_tiles; n += 32) {
    const int t = n % query_tiles;
    const int32_t* const map = map_tiles(m, map_number(m, entry, head + n / query_tiles, heads));
    const Tile kind = key_tile<kKeys>(m, q + t, segments, map, keys, tile);
    if (kind == Tile::kEmpty) continue;
    first = min(first, t), stop = max(stop, t + 1), ++weight;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {  // those that all queries of the tile see
      unseen[w] |= kind == Tile::kFull ? ~0u
                   : ranges_only       ? range_bits(q[t].max_start, q[t].min_end, key + 32 * w)
                                       : 0u;
    }
  }
  first = __reduce_min_sync(~0u, first), stop = __reduce_max_sync(~0u, stop);
  weight = __reduce_add_sync(~0u, weight);
  uint32_t any = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    unseen[w] = low_bits(keys - key - 32 * w) & ~__reduce_or_sync(~0u, unseen[w]);
    any |= unseen[w];
  }
  // Keys that no tile sees as a whole: query by query, until all are seen.
  for (int n = 0; any && n < maps * query_tiles; n += 32) {
    const auto may_see = [&](int i) {
      if (i >= maps * query_tiles) return false;
      const int t = i % query_tiles;
      uint32_t some = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        some |= unseen[w] & range_bits(q[t].min_start, q[t].max_end, key + 32 * w);
      }
      const int32_t* const map = map_tiles(m, map_number(m, entry, head + i / query_tiles, heads));
      return some && key_tile<kKeys>(m, q + t, segments, map, keys, tile) != Tile::kEmpty;
    };
    for (unsigned left = __ballot_sync(~0u, may_see(n + lane)); any && left; left &= left - 1) {
      const int i = n + __ffs(left) - 1;
      const int64_t map = map_number(m, entry, head + i / query_tiles, heads);
      uint32_t seen[kWords] = {};
      for (int row = 0; row < kQueryTile; row += 32) {
        uint32_t bits[1][kWords];
        query_bits<kKeys>(m, map, entry, i % query_tiles * kQueryTile + row, queries, key, keys,
                          bits);
#pragma unroll
        for (int w = 0; w < kWords; ++w) seen[w] |= bits[0][w];
      }
      any = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        unseen[w] &= ~__reduce_or_sync(~0u, seen[w]);
        any |= unseen[w];
      }
    }
  }
  if (lane > 0) return;
  KeyBounds x = {{}, first, stop, weight};
#pragma unroll
  for (int w = 0; w < kWords; ++w) x.unseen[w] = unseen[w];
  result[item] = x;
}

// The tiles of each group by their weights, the heaviest first. A warp takes a tile and finds its
// place.
static __global__ void __launch_bounds__(kKeyBoundsThreads, 1)
    order_kernel(const KeyBounds* keys, int64_t items, int key_tiles, int* order) {
  const int64_t item = int64_t{blockIdx.x} * (kKeyBoundsThreads / 32) + threadIdx.x / 32;
  if (item >= items) return;
  const int64_t group = item / key_tiles;
  const int tile = static_cast<int>(item - group * key_tiles), weight = keys[item].weight;
  int before = 0;
  for (int i = threadIdx.x % 32; i < key_tiles; i += 32) {
    const int other = keys[group * key_tiles + i].weight;
    before += other > weight || (other == weight && i < tile);
  }
  before = __reduce_add_sync(~0u, before);
  if (threadIdx.x % 32 == 0) order[group * key_tiles + before] = tile;
}

}  // namespace jax_dsa::masked_attention
