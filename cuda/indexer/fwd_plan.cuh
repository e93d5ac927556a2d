// How the indexer's forward kernels divide their work. A work tile is `Tr::kQueries` queries of one
// request with the key tiles that any of these queries sees. The key tiles of all work tiles, end
// to end, are divided into equal work ranges, one per CTA. Each CTA adds up the costs of the work
// tiles itself. This takes microseconds and needs no other kernel and no workspace. The -inf before
// and after the key tiles of a work tile are divided separately.
#pragma once

#include <climits>

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/types.h"
#include "indexer/indexer.h"

namespace jax_dsa::indexer {

// The fixed cost of a work tile in key tiles, for loading its queries and weights.
inline constexpr int kWorkTileCost = 2;

// The work of one CTA, in key tiles and fixed costs.
struct WorkRange {
  int64_t work_tile;  // index of the first work tile
  int skip;           // how much of the first work tile belongs to an earlier CTA
  int64_t work;       // length of the range
};

// A half-open range of key tiles; first == last == 0 if it is empty.
struct KeyTiles {
  int first, last;
};

// Extends the range [low, high) so that it covers the keys that query `t` of `batch` sees.
__device__ __forceinline__ void extend_range(const IndexerFwdParams& p, int64_t batch, int64_t t,
                                             int& low, int& high) {
  const int64_t at = batch * p.queries + t;
  const int start = max(__ldg(p.starts + at), 0);
  const int end = min(__ldg(p.ends + at), static_cast<int>(p.keys));
  if (start < end) {
    low = min(low, start);
    high = max(high, end);
  }
}

__device__ __forceinline__ KeyTiles covering_tiles(int low, int high) {
  return low < high ? KeyTiles{low / kTile, ceil_div(high, kTile)} : KeyTiles{0, 0};
}

// Returns the address of the page table entry for key tile `tile` of a request.
__device__ __forceinline__ const int32_t* page_entry(const IndexerFwdParams& p, int64_t batch,
                                                     int tile) {
  const int per_page = p.page_size / kTile;
  return p.page_table + batch * p.pages_per_request + tile / per_page;
}
__device__ __forceinline__ bool is_mapped_page(const IndexerFwdParams& p, int page) {
  return page >= 0 && page < p.pages;
}
// Returns the first row of the key tile in its pool, or a row beyond the pool if the page is
// unmapped.
__device__ __forceinline__ int row_in_pool(const IndexerFwdParams& p, int tile, int page) {
  const bool mapped = is_mapped_page(p, page);
  const int per_page = p.page_size / kTile;
  return (mapped ? page : p.pages) * p.page_size + (mapped ? tile % per_page * kTile : 0);
}
__device__ __forceinline__ int row_in_pool(const IndexerFwdParams& p, int64_t batch, int tile) {
  return row_in_pool(p, tile, __ldg(page_entry(p, batch, tile)));
}

// Returns the key tiles that any of `count` queries sees. Whole warps call it.
__device__ __forceinline__ KeyTiles tiles_seen(const IndexerFwdParams& p, int64_t batch,
                                               int64_t query, int count) {
  const int lane = threadIdx.x % 32;
  int low = INT_MAX, high = 0;
  if (lane < count && query + lane < p.queries) extend_range(p, batch, query + lane, low, high);
  return covering_tiles(__reduce_min_sync(~0u, low), __reduce_max_sync(~0u, high));
}

// Iterates over the work tiles of a work range.
template <typename Tr>
struct Walk {
  const IndexerFwdParams& p;
  int64_t work_tile, left;
  int skip;
  int64_t batch, query;  // request and first query of the current work tile
  KeyTiles tiles;        // key tiles of the current work tile that belong to this CTA

  __device__ Walk(const IndexerFwdParams& p, const WorkRange& work_range)
      : p(p), work_tile(work_range.work_tile), left(work_range.work), skip(work_range.skip) {}

  __device__ bool next() {
    while (left > 0) {
      const int64_t per_batch = ceil_div(p.queries, int64_t{Tr::kQueries});
      batch = work_tile / per_batch;
      query = (work_tile - batch * per_batch) * Tr::kQueries;
      ++work_tile;
      tiles = tiles_seen(p, batch, query, Tr::kQueries);
      if (tiles.first == tiles.last) continue;
      const int work = kWorkTileCost + tiles.last - tiles.first;
      const int end = static_cast<int>(min(skip + left, int64_t{work}));
      left -= end - skip;
      tiles.last = tiles.first + max(end - kWorkTileCost, 0);
      tiles.first += max(skip - kWorkTileCost, 0);
      skip = 0;
      if (tiles.first < tiles.last) return true;
    }
    return false;
  }
};

// Returns the cost of a work tile, 0 if none of its queries sees a key.
template <typename Tr>
__device__ int tile_cost(const IndexerFwdParams& p, int64_t work_tile, int64_t per_batch) {
  const int64_t batch = work_tile / per_batch;
  const int64_t query = (work_tile - batch * per_batch) * Tr::kQueries;
  int low = INT_MAX, high = 0;
#pragma unroll 4
  for (int i = 0; i < Tr::kQueries; ++i) {
    if (query + i < p.queries) extend_range(p, batch, query + i, low, high);
  }
  const KeyTiles tiles = covering_tiles(low, high);
  return tiles.first < tiles.last ? kWorkTileCost + tiles.last - tiles.first : 0;
}

// Finds the work range of this CTA. All threads call it.
template <typename Tr, typename Shared>
__device__ void find_work_range(const IndexerFwdParams& p, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t per_batch = ceil_div(p.queries, int64_t{Tr::kQueries});
  const int64_t work_tiles = p.batch * per_batch;
  const int64_t tiles_per_thread = ceil_div(work_tiles, int64_t{Tr::kThreads});
  const int64_t first = min(tiles_per_thread * threadIdx.x, work_tiles);
  const int64_t last = min(first + tiles_per_thread, work_tiles);
  int64_t own = 0;
  for (int64_t i = first; i < last; ++i) own += tile_cost<Tr>(p, i, per_batch);
  // The sum over the lanes of the warp up to this one; below, over all threads before this one.
  int64_t up_to = inclusive_scan(own);
  if (lane == 31) shared.warp_sums[warp] = up_to;
  if (threadIdx.x == 0) shared.work_range = {0, 0, 0};
  __syncthreads();
  int64_t total = 0;
  up_to -= own;
  for (int i = 0; i < Tr::kThreads / 32; ++i) {
    if (i < warp) up_to += shared.warp_sums[i];
    total += shared.warp_sums[i];
  }
  const int64_t each = total / gridDim.x, more = total % gridDim.x, block = blockIdx.x;
  const int64_t begin = each * block + min(block, more);
  const int64_t work = each + (block < more ? 1 : 0);
  if (work > 0 && up_to <= begin && begin < up_to + own) {
    int64_t work_tile = first, before = up_to;
    for (;;) {
      const int count = tile_cost<Tr>(p, work_tile, per_batch);
      if (begin < before + count) break;
      before += count;
      ++work_tile;
    }
    shared.work_range = {work_tile, static_cast<int>(begin - before), work};
  }
  __syncthreads();
}

// ---- -inf --------------------------------------------------------------------------------------

// Stores -inf to out[first .. last). One warp calls it. Each lane stores 16 bytes at a time where
// the alignment allows.
__device__ __forceinline__ void fill_row(float* out, int first, int last) {
  const int lane = threadIdx.x % 32;
  if (first >= last) return;
  const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(out + first) / 4 % 4);
  const int body = min(first + (4 - odd) % 4, last), tail = body + (last - body) / 4 * 4;
  if (lane < body - first) __stcs(out + first + lane, -INFINITY);
  const float4 x = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  for (int i = body + 4 * lane; i < tail; i += 128) __stcs(reinterpret_cast<float4*>(out + i), x);
  if (lane < last - tail) __stcs(out + tail + lane, -INFINITY);
}

// Stores -inf before and after the key tiles of each work tile. The unit of work is kFillKeys keys
// of one work tile; units are assigned to the CTAs round-robin.
template <typename Tr>
__device__ void fill(const IndexerFwdParams& p, int warp) {
  constexpr int kFillKeys = 4096;
  const int64_t per_batch = ceil_div(p.queries, int64_t{Tr::kQueries});
  const int64_t chunks_per_tile = ceil_div(p.keys, int64_t{kFillKeys});
  const int64_t chunks = p.batch * per_batch * chunks_per_tile;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64_t work_tile = chunk / chunks_per_tile, batch = work_tile / per_batch;
    const int64_t query = (work_tile - batch * per_batch) * Tr::kQueries;
    const KeyTiles tiles = tiles_seen(p, batch, query, Tr::kQueries);
    const int64_t first = (chunk - work_tile * chunks_per_tile) * kFillKeys;
    const int64_t last = min(first + kFillKeys, p.keys);
    const int64_t low = min(int64_t{tiles.first} * kTile, p.keys);
    const int64_t high = min(int64_t{tiles.last} * kTile, p.keys);
    for (int i = warp; i < Tr::kQueries && query + i < p.queries; i += Tr::kFillWarps) {
      float* const row = p.out + (batch * p.queries + query + i) * p.keys;
      fill_row(row, static_cast<int>(first), static_cast<int>(min(last, low)));
      fill_row(row, static_cast<int>(max(first, high)), static_cast<int>(last));
    }
  }
}

}  // namespace jax_dsa::indexer
