// The work of the indexer's forward kernels. An item is `Tr::kQueries` queries of a request; its
// key tiles are those that any of its queries sees. All items' key tiles in order are cut into
// equal shares, one a block: each block sums up the items' counts itself, which takes microseconds
// and needs no other kernel and no workspace. The -inf between the items' tiles and the rows' ends
// are dealt out separately.
#pragma once

#include <climits>

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/types.h"
#include "indexer/indexer.h"

namespace jax_dsa::indexer {

// What an item costs before its first tile, in tiles: its queries and weights must come.
inline constexpr int kItemCost = 2;

// A block's part of the work of all items, in tiles.
struct Share {
  int64_t item;  // the first
  int skip;      // of the first item, an earlier block's
  int64_t work;
};

// A range of key tiles; first == last == 0 if there are none.
struct Tiles {
  int first, last;
};

// Adds query `t` of `batch` to the keys [low, high) seen.
__device__ __forceinline__ void see(const IndexerFwdParams& p, int64_t batch, int64_t t, int& low,
                                    int& high) {
  const int64_t at = batch * p.queries + t;
  const int start = max(__ldg(p.starts + at), 0);
  const int end = min(__ldg(p.ends + at), static_cast<int>(p.keys));
  if (start < end) {
    low = min(low, start);
    high = max(high, end);
  }
}

__device__ __forceinline__ Tiles tiles_of(int low, int high) {
  return low < high ? Tiles{low / kTile, ceil_div(high, kTile)} : Tiles{0, 0};
}

// Where a request's page table has the page of a tile of its keys.
__device__ __forceinline__ const int32_t* page_entry(const IndexerFwdParams& p, int64_t batch,
                                                     int tile) {
  const int per_page = p.page_size / kTile;
  return p.page_table + batch * p.pages_per_request + tile / per_page;
}
__device__ __forceinline__ bool is_page(const IndexerFwdParams& p, int page) {
  return page >= 0 && page < p.pages;
}
// Where the tile lies in its pool; beyond the pool if its page is not there.
__device__ __forceinline__ int row_in_pool(const IndexerFwdParams& p, int tile, int page) {
  const bool there = is_page(p, page);
  const int per_page = p.page_size / kTile;
  return (there ? page : p.pages) * p.page_size + (there ? tile % per_page * kTile : 0);
}
__device__ __forceinline__ int row_in_pool(const IndexerFwdParams& p, int64_t batch, int tile) {
  return row_in_pool(p, tile, __ldg(page_entry(p, batch, tile)));
}

// The key tiles that any of `count` queries sees; called by whole warps.
__device__ __forceinline__ Tiles tiles_seen(const IndexerFwdParams& p, int64_t batch, int64_t query,
                                            int count) {
  const int lane = threadIdx.x % 32;
  int low = INT_MAX, high = 0;
  if (lane < count && query + lane < p.queries) see(p, batch, query + lane, low, high);
  return tiles_of(__reduce_min_sync(~0u, low), __reduce_max_sync(~0u, high));
}

// The items of a block's share, one after the other.
template <typename Tr>
struct Walk {
  const IndexerFwdParams& p;
  int64_t item, left;
  int skip;
  int64_t batch, query;  // of the current item
  Tiles tiles;           // of the current item, those of this block

  __device__ Walk(const IndexerFwdParams& p, const Share& share)
      : p(p), item(share.item), left(share.work), skip(share.skip) {}

  __device__ bool next() {
    while (left > 0) {
      const int64_t per_batch = ceil_div(p.queries, int64_t{Tr::kQueries});
      batch = item / per_batch;
      query = (item - batch * per_batch) * Tr::kQueries;
      ++item;
      tiles = tiles_seen(p, batch, query, Tr::kQueries);
      if (tiles.first == tiles.last) continue;
      const int work = kItemCost + tiles.last - tiles.first;
      const int end = static_cast<int>(min(skip + left, int64_t{work}));
      left -= end - skip;
      tiles.last = tiles.first + max(end - kItemCost, 0);
      tiles.first += max(skip - kItemCost, 0);
      skip = 0;
      if (tiles.first < tiles.last) return true;
    }
    return false;
  }
};

template <typename Tr>
__device__ int item_work(const IndexerFwdParams& p, int64_t item, int64_t per_batch) {
  const int64_t batch = item / per_batch, query = (item - batch * per_batch) * Tr::kQueries;
  int low = INT_MAX, high = 0;
#pragma unroll 4
  for (int i = 0; i < Tr::kQueries; ++i) {
    if (query + i < p.queries) see(p, batch, query + i, low, high);
  }
  const Tiles tiles = tiles_of(low, high);
  return tiles.first < tiles.last ? kItemCost + tiles.last - tiles.first : 0;
}

// Finds this block's share; called by all threads.
template <typename Tr, typename Shared>
__device__ void find_share(const IndexerFwdParams& p, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t per_batch = ceil_div(p.queries, int64_t{Tr::kQueries});
  const int64_t items = p.batch * per_batch;
  const int64_t chunk = ceil_div(items, int64_t{Tr::kThreads});
  const int64_t first = min(chunk * threadIdx.x, items), last = min(first + chunk, items);
  int64_t own = 0;
  for (int64_t item = first; item < last; ++item) own += item_work<Tr>(p, item, per_batch);
  int64_t up_to = inclusive_scan(own);  // of the warp's lanes, then of all threads before this one
  if (lane == 31) shared.warp_sums[warp] = up_to;
  if (threadIdx.x == 0) shared.share = {0, 0, 0};
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
    int64_t item = first, before = up_to;
    for (;;) {
      const int count = item_work<Tr>(p, item, per_batch);
      if (begin < before + count) break;
      before += count;
      ++item;
    }
    shared.share = {item, static_cast<int>(begin - before), work};
  }
  __syncthreads();
}

// ---- -inf --------------------------------------------------------------------------------------

// -inf to out[first .. last), by a warp; 16 bytes a lane where the address allows.
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

// The rows' parts before and after their item's key tiles, in pieces of one item and kPiece keys,
// dealt out to the blocks in turn.
template <typename Tr>
__device__ void fill(const IndexerFwdParams& p, int warp) {
  constexpr int kPiece = 4096;
  const int64_t per_batch = ceil_div(p.queries, int64_t{Tr::kQueries});
  const int64_t per_item = ceil_div(p.keys, int64_t{kPiece});
  const int64_t pieces = p.batch * per_batch * per_item;
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const int64_t item = piece / per_item, batch = item / per_batch;
    const int64_t query = (item - batch * per_batch) * Tr::kQueries;
    const Tiles tiles = tiles_seen(p, batch, query, Tr::kQueries);
    const int64_t first = (piece - item * per_item) * kPiece;
    const int64_t last = min(first + kPiece, p.keys);
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
