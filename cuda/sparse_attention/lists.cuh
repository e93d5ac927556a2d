// Lists of the blocks of keys that a tile of neighbouring queries needs.
//
// Queries that are next to each other see mostly the same blocks. A tile of queries therefore walks
// over the union of their lists, and one bit per query tells who sees a block. `make_unions` makes
// these unions before the main kernels run.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/ptx.cuh"
#include "common/types.h"
#include "sparse_attention/sparse_attention.h"

namespace jax_dsa::sparse_attention {

// Returns the base-2 logarithm of a power of two.
__host__ __device__ inline int log2_of(int n) {
  int log = 0;
  while (1 << log < n) ++log;
  return log;
}

// The unions of all tiles of `tile_queries` consecutive queries of one batch entry and KV head.
// Tile t of KV head g in batch entry b has the index (b * groups + g) * tiles + t. The entries of a
// tile are in ascending order of rows of k. A block that one query names several times has an entry
// of its own for each further time.
struct TileLists {
  int32_t* counts;  // [batch * groups * tiles]: number of entries of a tile
  // [batch * groups * tiles, capacity]: the first row of k of an entry's block.
  int32_t* rows;
  // [batch * groups * tiles, capacity, words]: bit i of word w tells whether query 32 w + i of the
  // tile sees keys of the block.
  uint32_t* queries;
  int64_t tiles;  // per batch entry and KV head
  int tile_queries;
  int capacity;  // entries of a tile, at most
  int words;     // ceil(tile_queries / 32)
};

// Entries of a tile that fit in shared memory.
inline constexpr int kMaxTileEntries = kSparseAttentionMaxSlots;
inline constexpr int kMaxTileQueries = 128;

// The blocks that every query sees beside its slots, at most as many as there are blocks.
struct ForcedBlocks {
  int sinks, local, tail;

  template <typename Params>
  __host__ __device__ explicit ForcedBlocks(const Params& p) {
    const SparseAttentionLists& x = p.lists;
    const int64_t blocks = ceil_div(p.keys, int64_t{x.block_size});
    const auto capped = [&](int n) { return static_cast<int>(n < blocks ? n : blocks); };
    sinks = x.positions ? capped(x.sink_blocks) : 0;
    local = x.positions ? capped(x.local_blocks) : 0;
    // The newest local block is the query's own block, and so is the tail block.
    tail = x.positions && x.tail_block && local == 0;
  }
  __host__ __device__ int count() const { return sinks + local + tail; }
};

// Returns how many queries a tile has, whose rows are the `heads` query heads of a KV head for each
// query. 0: the lists are too long.
template <typename Params>
int tile_queries(const Params& p, int rows) {
  const int64_t slots = std::max(int64_t{1}, int64_t{p.lists.slots} + ForcedBlocks(p).count());
  const int64_t fit = std::min(int64_t{rows / (p.heads / p.groups)}, kMaxTileEntries / slots);
  return static_cast<int>(std::min(fit, int64_t{kMaxTileQueries}));
}

// Describes unions of tiles of `tile_queries` queries in `workspace`.
template <typename Params>
TileLists tile_lists(const Params& p, int tile_queries, void* workspace) {
  TileLists x = {};
  x.tile_queries = tile_queries;
  x.tiles = ceil_div(p.queries, int64_t{tile_queries});
  x.capacity = tile_queries * (p.lists.slots + ForcedBlocks(p).count());
  x.words = ceil_div(tile_queries, 32);
  const int64_t tiles = p.batch * p.groups * x.tiles;
  x.counts = static_cast<int32_t*>(workspace);
  x.rows = x.counts + ceil_div(tiles, int64_t{4}) * 4;
  x.queries = reinterpret_cast<uint32_t*>(x.rows) + ceil_div(tiles * x.capacity, int64_t{4}) * 4;
  return x;
}

// Returns the bytes that `tile_lists` describes, a multiple of 16.
template <typename Params>
int64_t tile_lists_bytes(const Params& p, int tile_queries) {
  const TileLists x = tile_lists(p, tile_queries, nullptr);
  const int64_t tiles = p.batch * p.groups * x.tiles;
  const auto aligned = [](int64_t n) { return ceil_div(n, int64_t{4}) * 16; };
  return aligned(tiles) + aligned(tiles * x.capacity) + aligned(tiles * x.capacity * x.words);
}

// Returns the row of k at position 0 of a query; `at` is its index in [batch, queries].
__device__ __forceinline__ int first_key(const SparseAttentionLists& x, int64_t at) {
  return x.starts ? __ldg(x.starts + at) : 0;
}

// Returns the row of k after the last one that a query sees.
__device__ __forceinline__ int key_end(const SparseAttentionLists& x, int64_t at, int64_t keys) {
  const int64_t start = first_key(x, at);
  int64_t end = keys;
  if (x.lengths) end = min(end, start + __ldg(x.lengths + at));
  if (x.positions) end = min(end, start + __ldg(x.positions + at) + 1);
  return static_cast<int>(max(end, int64_t{0}));
}

// Returns the number of the block in a slot of a query. Slots after the last one hold forced
// blocks. Some numbers do not exist. `list` are the indices of the query.
__device__ __forceinline__ int64_t block_of(const SparseAttentionLists& x,
                                            const ForcedBlocks& forced, const int32_t* list,
                                            int64_t at, int slot) {
  if (slot < x.slots) {
    return !x.topk_length || slot < __ldg(x.topk_length + at) ? __ldg(list + slot) : -1;
  }
  slot -= x.slots;
  if (slot < forced.sinks) return slot;
  slot -= forced.sinks;
  const int position = __ldg(x.positions + at);
  if (position < 0) return -1;
  const int own = position / x.block_size;
  if (slot < forced.local) {
    const int block = max(own - (x.local_blocks - 1), 0) + slot;
    return block <= own ? block : -1;
  }
  return position % x.block_size != x.block_size - 1 ? own : -1;
}

// What the unions depend on.
struct ListCall {
  SparseAttentionLists lists;
  int64_t batch, queries, keys;
  int groups;

  template <typename Params>
  explicit ListCall(const Params& p)
      : lists(p.lists), batch(p.batch), queries(p.queries), keys(p.keys), groups(p.groups) {}
};

// Launches the kernel that makes the unions.
cudaError_t make_unions(const ListCall& call, const TileLists& lists, cudaStream_t stream);

}  // namespace jax_dsa::sparse_attention
