// Which queries see the keys of a work tile, for the masked attention backward kernel.
#pragma once

#include "masked_attention/mask.cuh"

namespace jax_dsa::masked_attention {

// Bounds of a work tile: 128 or 64 keys of one KV head.
struct alignas(16) KeyBounds {
  uint32_t unseen[kKeyTile / 32];  // one bit per key that no query of the group sees
  int first, stop;  // range of the query tiles that see any of the keys; empty if first >= stop
  int weight;       // number of those tiles, over all heads of the group that have their own map
};

inline constexpr int kKeyBoundsThreads = 128;

// Returns which of the 32 keys from `first` on are in [start, end).
__device__ __forceinline__ uint32_t range_bits(int start, int end, int first) {
  return low_bits(max(end, 0) - first) & ~low_bits(max(start, 0) - first);
}

// Computes the bounds of one work tile per warp.
template <int kKeys>
static __global__ void __launch_bounds__(kKeyBoundsThreads, 1)
    key_bounds_kernel(const __grid_constant__ AttentionMask m,
                      const __grid_constant__ Bounds bounds, int64_t work_tiles, int64_t queries,
                      int keys, int heads, int groups, KeyBounds* result) {
  constexpr int kWords = kKeys / 32;
  const int lane = threadIdx.x % 32;
  const int64_t work_tile = int64_t{blockIdx.x} * (kKeyBoundsThreads / 32) + threadIdx.x / 32;
  if (work_tile >= work_tiles) return;
  const int key_tiles = ceil_div(keys, kKeys);
  const int query_tiles = static_cast<int>(ceil_div(queries, int64_t{kQueryTile}));
  const int64_t pair = work_tile / key_tiles, batch_index = pair / groups;
  const int tile = static_cast<int>(work_tile - pair * key_tiles), key = tile * kKeys;
  const int heads_per_group = heads / groups;
  const int head = static_cast<int>(pair - batch_index * groups) * heads_per_group;
  const int maps = m.map_rows && m.map_heads > groups ? heads_per_group : 1;  // maps of the group
  const QueryBounds* const q = bounds.queries + batch_index * query_tiles;
  const SegmentBounds* const segments =
      bounds.segments ? bounds.segments + batch_index * ceil_div(keys, kKeyTile) : nullptr;
  const bool ranges_only = !m.map_rows && !m.q_segments;

  int first = INT_MAX, stop = 0, weight = 0;
  uint32_t unseen[kWords] = {};
  for (int n = lane; n < maps * query_tiles; n += 32) {
    const int t = n % query_tiles;
    const int32_t* const map =
        map_tiles(m, mask_map_index(m, batch_index, head + n / query_tiles, heads));
    const TileKind kind = classify_key_tile<kKeys>(m, q + t, segments, map, keys, tile);
    if (kind == TileKind::kEmpty) continue;
    first = min(first, t), stop = max(stop, t + 1), ++weight;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {  // keys that all queries of the tile see; negated below
      unseen[w] |= kind == TileKind::kFull ? ~0u
                   : ranges_only           ? range_bits(q[t].max_start, q[t].min_end, key + 32 * w)
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
  // Some keys are not seen by any query tile as a whole. Check them query by query, until all of
  // them are seen.
  for (int n = 0; any && n < maps * query_tiles; n += 32) {
    const auto may_see = [&](int i) {
      if (i >= maps * query_tiles) return false;
      const int t = i % query_tiles;
      uint32_t candidates = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        candidates |= unseen[w] & range_bits(q[t].min_start, q[t].max_end, key + 32 * w);
      }
      const int32_t* const map =
          map_tiles(m, mask_map_index(m, batch_index, head + i / query_tiles, heads));
      return candidates &&
             classify_key_tile<kKeys>(m, q + t, segments, map, keys, tile) != TileKind::kEmpty;
    };
    for (unsigned left = __ballot_sync(~0u, may_see(n + lane)); any && left; left &= left - 1) {
      const int i = n + __ffs(left) - 1;
      const int64_t map = mask_map_index(m, batch_index, head + i / query_tiles, heads);
      uint32_t seen[kWords] = {};
      for (int row = 0; row < kQueryTile; row += 32) {
        uint32_t bits[1][kWords];
        query_bits<kKeys>(m, map, batch_index, i % query_tiles * kQueryTile + row, queries, key,
                          keys, bits);
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
  result[work_tile] = x;
}

// Sorts the key tiles of each KV head by weight, the heaviest first. Each warp takes one tile and
// computes its rank.
static __global__ void __launch_bounds__(kKeyBoundsThreads, 1)
    order_kernel(const KeyBounds* keys, int64_t work_tiles, int key_tiles, int* order) {
  const int64_t work_tile = int64_t{blockIdx.x} * (kKeyBoundsThreads / 32) + threadIdx.x / 32;
  if (work_tile >= work_tiles) return;
  const int64_t group = work_tile / key_tiles;
  const int tile = static_cast<int>(work_tile - group * key_tiles), weight = keys[work_tile].weight;
  int before = 0;
  for (int i = threadIdx.x % 32; i < key_tiles; i += 32) {
    const int other = keys[group * key_tiles + i].weight;
    before += other > weight || (other == weight && i < tile);
  }
  before = __reduce_add_sync(~0u, before);
  if (threadIdx.x % 32 == 0) order[group * key_tiles + before] = tile;
}

// Returns how many key tiles before tile `stop` are seen by any query of a query tile. A whole warp
// calls this.
template <int kKeys>
__device__ __forceinline__ uint32_t visible_tiles_before(const AttentionMask& m,
                                                         const QueryBounds* q,
                                                         const SegmentBounds* segments,
                                                         const int32_t* map, int keys, int stop) {
  if (q == nullptr) return stop;
  uint32_t count = 0;
  for (int at = max(q->min_start, 0) / kKeys; at < stop; at += 32) {
    const int tile = at + static_cast<int>(threadIdx.x % 32);
    const bool nonempty = tile < stop && classify_key_tile<kKeys>(m, q, segments, map, keys,
                                                                  tile) != TileKind::kEmpty;
    count += __popc(__ballot_sync(~0u, nonempty));
  }
  return count;
}

}  // namespace jax_dsa::masked_attention
