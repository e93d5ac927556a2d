// Lists of the blocks of keys that a tile of neighbouring queries needs.
//
// Queries that are next to each other see mostly the same blocks. A tile of queries therefore walks
// over the union of their lists, and one bit per query tells who sees a block. `union_kernel` makes
// these unions before the main kernels run: it sorts the blocks of all queries of a tile.
#pragma once

#include <climits>
#include <cstdint>

#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "sparse_attention/sparse_attention.h"

namespace jax_dsa::sparse_attention {

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

// ---- union_kernel ------------------------------------------------------------------------------

// A block of a query as a number whose order is that of rows, then queries, then forced blocks
// after those of slots.
struct SortedBlock {
  uint64_t bits;

  static constexpr uint64_t kNone = ~uint64_t{0};
  __device__ static SortedBlock of(int64_t row, int query, bool forced) {
    return {static_cast<uint64_t>(row) << 8 | query << 1 | static_cast<int>(forced)};
  }
  __device__ bool exists() const { return bits != kNone; }
  __device__ int row() const { return static_cast<int>(bits >> 8); }
  __device__ int query() const { return static_cast<int>(bits >> 1 & 127); }
  __device__ bool forced() const { return bits & 1; }
  __device__ bool same_row(SortedBlock x) const { return bits >> 8 == x.bits >> 8; }
  __device__ bool same_query(SortedBlock x) const { return bits >> 1 == x.bits >> 1; }
};
static_assert(kMaxTileQueries <= 128);

struct UnionShared {
  int warp_sums[32];
  SortedBlock blocks[1];  // `padded` of them
};

// Each CTA makes the union of one tile. `padded` is a power of two, at least the tile's capacity
// and the number of threads.
template <typename Params>
__global__ void __launch_bounds__(1024)
    union_kernel(const __grid_constant__ Params p, const __grid_constant__ TileLists lists,
                 int padded) {
  auto& shared = dynamic_shared<UnionShared>();
  SortedBlock* const blocks = shared.blocks;
  const ForcedBlocks forced(p);
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int slots = p.lists.slots + forced.count();
  const int64_t index = blockIdx.x, list = index / lists.tiles;
  const int64_t batch = list / p.groups, group = list - batch * p.groups;
  const int64_t first_query = (index - list * lists.tiles) * lists.tile_queries;

  for (int i = thread; i < padded; i += threads) {
    SortedBlock x = {SortedBlock::kNone};
    const int query = slots > 0 ? i / slots : 0, slot = i - query * slots;
    if (i < lists.capacity && first_query + query < p.queries) {
      const int64_t at = batch * p.queries + first_query + query;
      const int64_t block = block_of(
          p.lists, forced, p.lists.indices + (at * p.groups + group) * p.lists.slots, at, slot);
      const int64_t row = first_key(p.lists, at) + block * p.lists.block_size;
      if (block >= 0 && row >= 0 && row < key_end(p.lists, at, p.keys)) {
        x = SortedBlock::of(row, query, slot >= p.lists.slots);
      }
    }
    blocks[i] = x;
  }
  __syncthreads();
  for (int run = 2; run <= padded; run *= 2) {
    for (int apart = run / 2; apart > 0; apart /= 2) {
      for (int i = thread; i < padded / 2; i += threads) {
        const int low = 2 * i - (i & (apart - 1)), high = low + apart;
        const SortedBlock x = blocks[low], y = blocks[high];
        if ((x.bits > y.bits) == ((low & run) == 0)) blocks[low] = y, blocks[high] = x;
      }
      __syncthreads();
    }
  }

  // A block becomes an entry if it is the first of its row, or if its query has named it before. A
  // forced block that its query has named does not count.
  const int run = padded / threads, begin = thread * run;
  const auto repeated = [&](int i) { return i > 0 && blocks[i].same_query(blocks[i - 1]); };
  const auto is_first = [&](int i) { return i == 0 || !blocks[i].same_row(blocks[i - 1]); };
  const auto is_entry = [&](int i) {
    return blocks[i].exists() && (is_first(i) || (repeated(i) && !blocks[i].forced()));
  };
  int count = 0;
  for (int i = begin; i < begin + run; ++i) count += is_entry(i);
  const int sum = inclusive_scan(count);
  if (thread % 32 == 31) shared.warp_sums[thread / 32] = sum;
  __syncthreads();
  int entry = sum - count, total = 0;
  for (int w = 0; w < threads / 32; ++w) {
    if (w < thread / 32) entry += shared.warp_sums[w];
    total += shared.warp_sums[w];
  }
  if (thread == 0) lists.counts[index] = total;
  for (int i = begin; i < begin + run; ++i) {
    if (!is_entry(i)) continue;
    const int64_t to = index * lists.capacity + entry;
    lists.rows[to] = blocks[i].row();
    for (int w = 0; w < lists.words; ++w) {
      uint32_t bits = 0;
      const auto add = [&](int query) {
        if (query / 32 == w) bits |= 1u << query % 32;
      };
      add(blocks[i].query());
      for (int j = i + 1; is_first(i) && j < padded && blocks[j].same_row(blocks[i]); ++j) {
        add(blocks[j].query());
      }
      lists.queries[to * lists.words + w] = bits;
    }
    ++entry;
  }
}

// Launches the kernel that makes the unions.
template <typename Params>
cudaError_t make_unions(const Params& p, const TileLists& lists, cudaStream_t stream) {
  const int64_t tiles = p.batch * p.groups * lists.tiles;
  if (tiles > INT32_MAX || lists.capacity > kMaxTileEntries) return cudaErrorInvalidValue;
  int padded = 32;
  while (padded < lists.capacity) padded *= 2;
  const int threads = std::min(padded, padded <= 512 ? 128 : 1024);
  const int bytes = static_cast<int>(sizeof(UnionShared) + padded * sizeof(SortedBlock));
  return launch_blocks(union_kernel<Params>, tiles, threads, bytes, stream, p, lists, padded);
}

}  // namespace jax_dsa::sparse_attention
