// Which keys queries see, by tiles of queries and keys: a tile is empty and passed over, full and
// nothing is tested, or partial and has a bit for each of its scores. See AttentionMask.
#pragma once

#include <climits>
#include <cstdint>

#include "common/ptx.cuh"
#include "masked_attention/masked_attention.h"

namespace jax_dsa::masked_attention {

inline constexpr int kThreads = 384;    // of the kernels: three warpgroups
inline constexpr int kQueryTile = 128;  // of the bounds
inline constexpr int kKeyTile = 128;
inline constexpr int kBuilders = 96;  // threads that make bits: three warps

// What the queries of a tile see, at most and at least. Queries that see nothing count for the
// least alone.
struct QueryBounds {
  int min_start, max_start, min_end, max_end;
  int min_segment, max_segment;
  int first_row, last_row;  // of the map, in rows of tiles
};

struct SegmentBounds {
  int min, max;
};

// What bounds_kernel finds out; null where nothing is to be known.
struct Bounds {
  const QueryBounds* queries;     // [batch, tiles of queries]
  const SegmentBounds* segments;  // [batch, tiles of keys]
};

__host__ __device__ inline bool has_query_bounds(const AttentionMask& m) {
  return m.starts || m.ends || m.q_segments || m.map_rows;
}

// The bounds that a mask needs: of how many tiles of queries and of keys.
template <typename Params>
int64_t bounded_query_tiles(const Params& p) {
  return has_query_bounds(p.mask) ? p.batch * ceil_div(p.queries, int64_t{kQueryTile}) : 0;
}
template <typename Params>
int64_t bounded_key_tiles(const Params& p) {
  return p.mask.kv_segments ? p.batch * ceil_div(p.keys, int64_t{kKeyTile}) : 0;
}

// ---- bounds ------------------------------------------------------------------------------------

inline constexpr int kBoundsThreads = kQueryTile;

struct BoundsShared {
  int least[kBoundsThreads / 32][4], most[kBoundsThreads / 32][4];  // of a warp's
};

// The bounds of one tile of queries, or of the segments of one tile of keys.
static __global__ void __launch_bounds__(kBoundsThreads)
    bounds_kernel(const __grid_constant__ AttentionMask m, int64_t batch, int64_t queries,
                  int64_t keys, QueryBounds* query_bounds, SegmentBounds* segment_bounds) {
  auto& shared = dynamic_shared<BoundsShared>();
  const int64_t query_tiles = ceil_div(queries, int64_t{kQueryTile});
  const int64_t key_tiles = ceil_div(keys, int64_t{kKeyTile});
  const bool of_queries = blockIdx.x < batch * query_tiles;
  const int64_t number = of_queries ? blockIdx.x : blockIdx.x - batch * query_tiles;
  const int64_t tiles = of_queries ? query_tiles : key_tiles;
  const int64_t entry = number / tiles, tile = number - entry * tiles;
  const int64_t at = tile * kQueryTile + threadIdx.x;

  // start, end, segment, row of the map
  int low[4] = {INT_MAX, INT_MAX, INT_MAX, INT_MAX}, high[4] = {INT_MIN, INT_MIN, INT_MIN, INT_MIN};
  if (of_queries && at < queries) {
    const int64_t range = entry * m.range_stride + at;
    const int start = m.starts ? m.starts[range] : 0;
    const int end = m.ends ? m.ends[range] : INT_MAX;
    high[0] = start, low[1] = end;
    if (start < end) low[0] = start, high[1] = end;
    if (m.q_segments) low[2] = high[2] = m.q_segments[entry * queries + at];
    if (m.map_rows) {
      low[3] = high[3] = m.map_rows[entry * m.map_rows_stride + at] / m.block_q;
    }
  } else if (!of_queries && at < keys) {
    low[2] = high[2] = m.kv_segments[entry * keys + at];
  }
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    shared.least[warp][i] = __reduce_min_sync(~0u, low[i]);
    shared.most[warp][i] = __reduce_max_sync(~0u, high[i]);
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (int w = 0; w < kBoundsThreads / 32; ++w) {
      low[i] = min(low[i], shared.least[w][i]);
      high[i] = max(high[i], shared.most[w][i]);
    }
  }
  if (of_queries) {
    query_bounds[number] = {low[0], high[0], low[1], high[1], low[2], high[2], low[3], high[3]};
  } else {
    segment_bounds[number] = {low[2], high[2]};
  }
}

// ---- tiles -------------------------------------------------------------------------------------

enum class Tile { kEmpty, kFull, kPartial };

// The map's tiles for a head; null if there is no map.
__device__ __forceinline__ const int32_t* map_tiles(const AttentionMask& m, int64_t entry, int head,
                                                    int heads) {
  if (!m.map_rows) return nullptr;
  const int64_t b = m.map_batch == 1 ? 0 : entry;
  const int64_t h = head / (heads / m.map_heads);
  return m.tiles + (b * m.map_heads + h) * m.tile_rows * m.tile_columns;
}

// Tile `tile` of kKeys keys, as the queries of a tile see it; `q` is null if they see all.
template <int kKeys>
__device__ __forceinline__ Tile key_tile(const AttentionMask& m, const QueryBounds* q,
                                         const SegmentBounds* segments, const int32_t* map,
                                         int keys, int tile) {
  static_assert(kKeyTile % kKeys == 0);
  const int first = tile * kKeys, stop = first + kKeys;
  bool full = stop <= keys;
  if (q == nullptr) return full ? Tile::kFull : Tile::kPartial;
  if (q->max_end <= first || q->min_start >= min(stop, keys)) return Tile::kEmpty;
  full = full && q->max_start <= first && q->min_end >= stop;
  if (segments) {
    const SegmentBounds k = segments[first / kKeyTile];
    if (k.max < q->min_segment || k.min > q->max_segment) return Tile::kEmpty;
    full = full && k.min == k.max && q->min_segment == q->max_segment;
  }
  if (map) {
    bool some = false;
    for (int row = q->first_row; row <= q->last_row; ++row) {
      const int kind = __ldg(map + int64_t{row} * m.tile_columns + first / m.block_k);
      some = some || kind != -2;
      full = full && kind == -1;
    }
    if (!some) return Tile::kEmpty;
  }
  return full ? Tile::kFull : Tile::kPartial;
}

// The tiles of first..stop that are not empty, in ascending order; `kind` says what a tile is. 32
// are looked at a time, by a whole warp.
template <typename Kind>
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(int first, int stop, Kind kind)
      : kind(kind), at(first), stop(stop) {
    look();
  }
  // Whether there is another one; it is `tile()`.
  __device__ bool more() const { return some != 0; }
  __device__ int tile() const { return at - 32 + __ffs(some) - 1; }
  __device__ bool partial() const { return partly >> (__ffs(some) - 1) & 1; }
  __device__ __forceinline__ void pass() {
    some &= some - 1;
    look();
  }

 private:
  Kind kind;
  int at, stop;                   // of the tiles not looked at
  unsigned some = 0, partly = 0;  // of the 32 before `at`: those to come; those that are partial

  __device__ __forceinline__ void look() {
    while (some == 0 && at < stop) {
      const int tile = at + static_cast<int>(threadIdx.x % 32);
      const Tile x = tile < stop ? kind(tile) : Tile::kEmpty;
      some = __ballot_sync(~0u, x != Tile::kEmpty);
      partly = __ballot_sync(~0u, x == Tile::kPartial);
      at += 32;
    }
  }
};

// ---- bits --------------------------------------------------------------------------------------

// The lowest n bits, for n in any range.
__device__ __forceinline__ uint32_t low_bits(int n) {
  return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1;
}

// Which of the keys from `first` on query `query` sees, the lowest bit of the first word first.
template <int kKeys>
__device__ __forceinline__ void query_bits(const AttentionMask& m, const int32_t* map,
                                           int64_t entry, int query, int64_t queries, int first,
                                           int keys, uint32_t (&bits)[kKeys / 32]) {
  const int64_t range = entry * m.range_stride + query;
  const int start = m.starts ? max(__ldg(m.starts + range), 0) : 0;
  const int end = m.ends ? max(min(__ldg(m.ends + range), keys), 0) : keys;
#pragma unroll
  for (int w = 0; w < kKeys / 32; ++w) {
    const int at = first + 32 * w;
    bits[w] = low_bits(end - at) & ~low_bits(start - at);
  }
  if (m.kv_segments) {
    const int own = __ldg(m.q_segments + entry * queries + query);
    const int32_t* const segments = m.kv_segments + entry * keys;
#pragma unroll
    for (int w = 0; w < kKeys / 32; ++w) {
      uint32_t same = 0;
#pragma unroll 4
      for (int i = 0; i < 32; ++i) {
        same |= uint32_t{__ldg(segments + min(first + 32 * w + i, keys - 1)) == own} << i;
      }
      bits[w] &= same;
    }
  }
  if (map) {
    const int row = __ldg(m.map_rows + entry * m.map_rows_stride + query);
    const int tile_row = row / m.block_q;
    const int kind = __ldg(map + int64_t{tile_row} * m.tile_columns + first / m.block_k);
    if (kind == -2 || kind >= m.slots) {
#pragma unroll
      for (int w = 0; w < kKeys / 32; ++w) bits[w] = 0;
    } else if (kind >= 0) {
      const int64_t which = (map - m.tiles) / (int64_t{m.tile_rows} * m.tile_columns);
      const int64_t line = (which * m.slots + kind) * m.block_q + (row - tile_row * m.block_q);
      const auto* words = reinterpret_cast<const uint32_t*>(m.bits + line * (m.block_k / 8) +
                                                            first % m.block_k / 8);
#pragma unroll
      for (int w = 0; w < kKeys / 32; ++w) bits[w] &= __ldg(words + w);
    }
  }
}

// Shows the keys that a builder's rows have seen to the others: `all` has a row for each warp.
template <int kWords>
__device__ __forceinline__ void show_seen(uint32_t (&seen)[kWords],
                                          uint32_t (&all)[kBuilders / 32][kWords], int thread) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    seen[w] = __reduce_or_sync(~0u, seen[w]);
    if (thread % 32 == w) all[thread / 32][w] = seen[w];
  }
}

// Puts zeros in the rows of a tile whose bit is set in `rows`; by all builders.
template <int kRows, int kBlocks>
__device__ void clear_rows(uint8_t (&x)[kBlocks][kRows * 128], const uint32_t* rows, int thread) {
  const uint32_t zero[4] = {0, 0, 0, 0};
  for (int i = thread; i < kRows * 8; i += kBuilders) {
    if (!(rows[i / 256] >> (i / 8 % 32) & 1)) continue;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      store_shared_16(smem_address(x[block]) + i * 16, zero);
    }
  }
}

}  // namespace jax_dsa::masked_attention
