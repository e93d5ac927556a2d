// Visibility of tiles of queries and keys. The kernels skip an empty tile, use a full tile without
// testing scores, and read one bit per score for a partial tile. See AttentionMask.
#pragma once

#include <climits>
#include <cstdint>

#include "common/ptx.cuh"
#include "masked_attention/masked_attention.h"

namespace jax_dsa::masked_attention {

inline constexpr int kQueryTile = 128;  // queries of the backward pass's tiles with QueryBounds
inline constexpr int kKeyTile = 128;

// Bounds on what the queries of a tile see. A query with an empty range contributes to max_start
// and min_end only.
struct QueryBounds {
  int min_start, max_start, min_end, max_end;
  int min_segment, max_segment;
  int first_row, last_row;  // rows of tiles of the map
};

struct SegmentBounds {
  int min, max;
};

// The arrays that bounds_kernel fills. A pointer is null if the mask does not need that array.
struct Bounds {
  const QueryBounds* queries;     // [batch, query tiles]
  const SegmentBounds* segments;  // [batch, key tiles]
};

__host__ __device__ inline bool has_query_bounds(const AttentionMask& m) {
  return m.starts || m.ends || m.q_segments || m.map_rows;
}

// Return how many tiles of kQueries queries and how many key tiles need bounds.
template <int kQueries = kQueryTile, typename Params>
int64_t bounded_query_tiles(const Params& p) {
  return has_query_bounds(p.mask) ? p.batch * ceil_div(p.queries, int64_t{kQueries}) : 0;
}
template <typename Params>
int64_t bounded_key_tiles(const Params& p) {
  return p.mask.kv_segments ? p.batch * ceil_div(p.keys, int64_t{kKeyTile}) : 0;
}

// ---- bounds ------------------------------------------------------------------------------------

template <int kThreads>
struct BoundsShared {
  int warp_min[kThreads / 32][4], warp_max[kThreads / 32][4];  // one entry per warp
};

// Each CTA computes the bounds of one tile of kQueries queries, or the segment bounds of one key
// tile.
template <int kQueries>
static __global__ void __launch_bounds__(kQueries)
    bounds_kernel(const __grid_constant__ AttentionMask m, int64_t batch, int64_t queries,
                  int64_t keys, QueryBounds* query_bounds, SegmentBounds* segment_bounds) {
  static_assert(kQueries >= kKeyTile);
  auto& shared = dynamic_shared<BoundsShared<kQueries>>();
  const int64_t query_tiles = ceil_div(queries, int64_t{kQueries});
  const int64_t key_tiles = ceil_div(keys, int64_t{kKeyTile});
  const bool is_query_tile = blockIdx.x < batch * query_tiles;
  const int64_t index = is_query_tile ? blockIdx.x : blockIdx.x - batch * query_tiles;
  const int64_t tiles = is_query_tile ? query_tiles : key_tiles;
  const int64_t batch_index = index / tiles, tile = index - batch_index * tiles;
  const int64_t at = tile * (is_query_tile ? kQueries : kKeyTile) + threadIdx.x;

  // Minima and maxima of start, end, segment and map row.
  int low[4] = {INT_MAX, INT_MAX, INT_MAX, INT_MAX}, high[4] = {INT_MIN, INT_MIN, INT_MIN, INT_MIN};
  if (is_query_tile && at < queries) {
    const int64_t range = batch_index * m.range_stride + at;
    const int start = m.starts ? m.starts[range] : 0;
    const int end = m.ends ? m.ends[range] : INT_MAX;
    high[0] = start, low[1] = end;
    if (start < end) low[0] = start, high[1] = end;
    if (m.q_segments) low[2] = high[2] = m.q_segments[batch_index * queries + at];
    if (m.map_rows) {
      low[3] = high[3] = m.map_rows[batch_index * m.map_rows_stride + at] / m.block_q;
    }
  } else if (!is_query_tile && threadIdx.x < kKeyTile && at < keys) {
    low[2] = high[2] = m.kv_segments[batch_index * keys + at];
  }
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    shared.warp_min[warp][i] = __reduce_min_sync(~0u, low[i]);
    shared.warp_max[warp][i] = __reduce_max_sync(~0u, high[i]);
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (int w = 0; w < kQueries / 32; ++w) {
      low[i] = min(low[i], shared.warp_min[w][i]);
      high[i] = max(high[i], shared.warp_max[w][i]);
    }
  }
  if (is_query_tile) {
    query_bounds[index] = {low[0], high[0], low[1], high[1], low[2], high[2], low[3], high[3]};
  } else {
    segment_bounds[index] = {low[2], high[2]};
  }
}

// ---- tiles -------------------------------------------------------------------------------------

enum class TileKind { kEmpty, kFull, kPartial };

// Returns the index of the map of a head; 0 if there is no map.
__device__ __forceinline__ int64_t mask_map_index(const AttentionMask& m, int64_t batch_index,
                                                  int head, int heads) {
  if (!m.map_rows) return 0;
  const int64_t b = m.map_batch == 1 ? 0 : batch_index;
  return b * m.map_heads + head / (heads / m.map_heads);
}

// Returns the tiles of the map with this index; null if there is no map.
__device__ __forceinline__ const int32_t* map_tiles(const AttentionMask& m, int64_t index) {
  return m.map_rows ? m.tiles + index * m.tile_rows * m.tile_columns : nullptr;
}

// Classifies key tile `tile` of kKeys keys for all queries of a query tile. `q` is null if every
// query sees every key.
template <int kKeys>
__device__ __forceinline__ TileKind classify_key_tile(const AttentionMask& m, const QueryBounds* q,
                                                      const SegmentBounds* segments,
                                                      const int32_t* map, int keys, int tile) {
  static_assert(kKeyTile % kKeys == 0);
  const int first = tile * kKeys, stop = first + kKeys;
  bool full = stop <= keys;
  if (q == nullptr) return full ? TileKind::kFull : TileKind::kPartial;
  if (q->max_end <= first || q->min_start >= min(stop, keys)) return TileKind::kEmpty;
  full = full && q->max_start <= first && q->min_end >= stop;
  if (segments) {
    const SegmentBounds k = segments[first / kKeyTile];
    if (k.max < q->min_segment || k.min > q->max_segment) return TileKind::kEmpty;
    full = full && k.min == k.max && q->min_segment == q->max_segment;
  }
  if (map) {
    bool nonempty = false;
    for (int row = q->first_row; row <= q->last_row; ++row) {
      const int kind = __ldg(map + int64_t{row} * m.tile_columns + first / m.block_k);
      nonempty = nonempty || kind != -2;
      full = full && kind == -1;
    }
    if (!nonempty) return TileKind::kEmpty;
  }
  return full ? TileKind::kFull : TileKind::kPartial;
}

// Iterates over the non-empty tiles of [first, stop) in ascending order. `kind(tile)` classifies a
// tile. The lanes of a warp classify 32 tiles at a time, so the whole warp must call every method.
template <typename Kind>
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(int first, int stop, Kind kind)
      : kind(kind), at(first), stop(stop) {
    classify_next();
  }
  // Returns whether there is a current tile, whose index is `tile()`.
  __device__ bool has_tile() const { return nonempty != 0; }
  __device__ int tile() const { return at - 32 + __ffs(nonempty) - 1; }
  __device__ bool partial() const { return partial_bits >> (__ffs(nonempty) - 1) & 1; }
  __device__ __forceinline__ void advance() {
    nonempty &= nonempty - 1;
    classify_next();
  }

 private:
  Kind kind;
  int at, stop;  // `at` is the first tile that has not been classified
  // Bits of the 32 tiles before `at`: those still to visit, and those that are partial.
  unsigned nonempty = 0, partial_bits = 0;

  __device__ __forceinline__ void classify_next() {
    while (nonempty == 0 && at < stop) {
      const int tile = at + static_cast<int>(threadIdx.x % 32);
      const TileKind x = tile < stop ? kind(tile) : TileKind::kEmpty;
      nonempty = __ballot_sync(~0u, x != TileKind::kEmpty);
      partial_bits = __ballot_sync(~0u, x == TileKind::kPartial);
      at += 32;
    }
  }
};

// ---- bits --------------------------------------------------------------------------------------

// Returns a mask of the lowest n bits. n may be out of range.
__device__ __forceinline__ uint32_t low_bits(int n) {
  return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1;
}

// Loads a row of bits.
template <int kWords>
__device__ __forceinline__ void load_bits(const uint8_t* from, uint32_t (&bits)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 1) {
    bits[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kWords == 4) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
    bits[0] = x.x, bits[1] = x.y, bits[2] = x.z, bits[3] = x.w;
  } else {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
    bits[0] = x.x, bits[1] = x.y;
  }
}

// Computes which of the kKeys keys from `first` on each query sees, the lowest bit of the first
// word first. The whole warp calls this. Each lane has the queries `query` + lane, + 32, and so on,
// with the last query repeated beyond the end. Each step issues the loads of all rows before it
// uses any of them, to overlap their latencies.
template <int kKeys, int kRows>
__device__ __forceinline__ void query_bits(const AttentionMask& m, int64_t map, int64_t batch_index,
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
    const int32_t* const rows = m.map_rows + batch_index * m.map_rows_stride;
    int row[kRows], kind[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = __ldg(rows + at[r]);
    bool any_partial = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int tile_row = row[r] / m.block_q;
      row[r] -= tile_row * m.block_q;
      kind[r] = __ldg(tiles + int64_t{tile_row} * m.tile_columns);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (kind[r] >= m.slots) kind[r] = -2;
      any_partial = any_partial || kind[r] >= 0;
    }
    if (any_partial) {  // so slot 0 exists, and lanes without a partial tile may read it
      const uint8_t* const slots =
          m.bits + map * m.slots * m.block_q * (m.block_k / 8) + first % m.block_k / 8;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t bit_row = int64_t{max(kind[r], 0)} * m.block_q + row[r];
        load_bits(slots + bit_row * (m.block_k / 8), bits[r]);
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
      const int64_t range = batch_index * m.range_stride + at[r];
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
    for (int r = 0; r < kRows; ++r) own[r] = __ldg(m.q_segments + batch_index * queries + at[r]);
    const int32_t* const segments = m.kv_segments + batch_index * keys;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int key_segment = __ldg(segments + min(first + 32 * w + lane, keys - 1));
      uint32_t same[kRows] = {};
      for (uint32_t left = ~0u; left != 0;) {  // one round per distinct segment of the 32 keys
        const int segment = __shfl_sync(~0u, key_segment, __ffs(left) - 1);
        const uint32_t same_lanes = __ballot_sync(~0u, key_segment == segment);
        left &= ~same_lanes;
#pragma unroll
        for (int r = 0; r < kRows; ++r) same[r] |= own[r] == segment ? same_lanes : 0u;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) bits[r][w] &= same[r];
    }
  }
}

// Writes zeros to the rows of a shared-memory tile whose bit is set in `rows`. kThreads threads
// call this.
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
