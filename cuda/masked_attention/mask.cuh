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

// The number of a head's map; 0 if there is no map.
__device__ __forceinline__ int64_t map_number(const AttentionMask& m, int64_t entry, int head,
                                              int heads) {
  if (!m.map_rows) return 0;
  const int64_t b = m.map_batch == 1 ? 0 : entry;
  return b * m.map_heads + head / (heads / m.map_heads);
}

// The tiles of a map, by its number; null if there is no map.
__device__ __forceinline__ const int32_t* map_tiles(const AttentionMask& m, int64_t number) {
  return m.map_rows ? m.tiles + number * m.tile_rows * m.tile_columns : nullptr;
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

// A row of bits in memory.
template <int kWords>
__device__ __forceinline__ void load_bits(const uint8_t* from, uint32_t (&bits)[kWords]) {
  static_assert(kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
    bits[0] = x.x, bits[1] = x.y, bits[2] = x.z, bits[3] = x.w;
  } else {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
    bits[0] = x.x, bits[1] = x.y;
  }
}

// Which of the keys from `first` on a lane's queries see, the lowest bit of the first word first:
// by a whole warp, whose lanes have queries `query` + lane, and those 32, 64, ... further on.
// Beyond the last query is the last one again. Each step loads for all of them before any waits.
template <int kKeys, int kRows>
__device__ __forceinline__ void query_bits(const AttentionMask& m, int64_t map, int64_t entry,
                                           int query, int64_t queries, int first, int keys,
                                           uint32_t (&bits)[kRows][kKeys / 32]) {
  constexpr int kWords = kKeys / 32;
  const int lane = threadIdx.x % 32;
  int at[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    at[r] = min(query + r * 32 + lane, static_cast<int>(queries) - 1);
#pragma unroll
    for (int w = 0; w < kWords; ++w) bits[r][w] = ~0u;
  }
  if (m.map_rows) {
    const int32_t* const tiles = map_tiles(m, map) + first / m.block_k;
    const int32_t* const rows = m.map_rows + entry * m.map_rows_stride;
    int row[kRows], kind[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = __ldg(rows + at[r]);
    bool some = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int tile_row = row[r] / m.block_q;
      row[r] -= tile_row * m.block_q;
      kind[r] = __ldg(tiles + int64_t{tile_row} * m.tile_columns);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (kind[r] >= m.slots) kind[r] = -2;
      some = some || kind[r] >= 0;
    }
    if (some) {  // then there is a slot 0
      const uint8_t* const slots =
          m.bits + map * m.slots * m.block_q * (m.block_k / 8) + first % m.block_k / 8;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t line = int64_t{max(kind[r], 0)} * m.block_q + row[r];
        load_bits(slots + line * (m.block_k / 8), bits[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        bits[r][w] = kind[r] >= 0 ? bits[r][w] : kind[r] == -1 ? ~0u : 0u;
      }
    }
  }
  if (m.starts || m.ends || first + kKeys > keys) {
    int start[kRows], end[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t range = entry * m.range_stride + at[r];
      start[r] = m.starts ? max(__ldg(m.starts + range), 0) : 0;
      end[r] = m.ends ? max(min(__ldg(m.ends + range), keys), 0) : keys;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int from = first + 32 * w;
        bits[r][w] &= low_bits(end[r] - from) & ~low_bits(start[r] - from);
      }
    }
  }
  if (m.kv_segments) {
    int own[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) own[r] = __ldg(m.q_segments + entry * queries + at[r]);
    const int32_t* const segments = m.kv_segments + entry * keys;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int key_segment = __ldg(segments + min(first + 32 * w + lane, keys - 1));
      uint32_t same[kRows] = {};
      for (uint32_t left = ~0u; left != 0;) {  // a round for each segment of the 32 keys
        const int segment = __shfl_sync(~0u, key_segment, __ffs(left) - 1);
        const uint32_t its = __ballot_sync(~0u, key_segment == segment);
        left &= ~its;
#pragma unroll
        for (int r = 0; r < kRows; ++r) same[r] |= own[r] == segment ? its : 0u;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) bits[r][w] &= same[r];
    }
  }
}

// Puts zeros in the rows of a tile whose bit is set in `rows`; by so many threads.
template <int kRows, int kThreads, int kBlocks>
__device__ void clear_rows(uint8_t (&x)[kBlocks][kRows * 128], const uint32_t* rows, int thread) {
  const uint32_t zero[4] = {0, 0, 0, 0};
  for (int i = thread; i < kRows * 8; i += kThreads) {
    if (!(rows[i / 256] >> (i / 8 % 32) & 1)) continue;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      store_shared_16(smem_address(x[block]) + i * 16, zero);
    }
  }
}

}  // namespace jax_dsa::masked_attention
