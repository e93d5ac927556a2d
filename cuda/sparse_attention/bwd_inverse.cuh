// Inverse lists of sparse attention: per tile of 64 keys, the queries that see keys of it.
//
// A key tile consists of the rows 64 i to 64 i + 63 of k, of one batch entry and KV head, whatever
// the blocks are. An entry of its list is a query and a mask of the keys that the query sees. The
// blocks of a query in the tile share an entry, unless they have a key in common.
//
// A counting sort builds the lists from the unions of lists.cuh. A chunk of the queries counts its
// entries per key tile, the sums of all counts are the places of the entries, and each chunk writes
// its entries there. The entries of a key tile are in ascending order of queries, and their order
// is always the same.
//
// Work items. The queries are divided into ranges of several chunks. The items of the first range
// of all key tiles come before those of the second range, and so on. CTAs that run at the same time
// thus read rows of the same queries, which the L2 cache holds. And when a CTA takes an item, the
// part of the list before it was usually finished long ago.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/types.h"
#include "sparse_attention/lists.cuh"

namespace jax_dsa::sparse_attention {

inline constexpr int kInverseThreads = 256;
inline constexpr int kPlanThreads = 1024;
// About how many CTAs build the lists. Each of them processes a chunk of the queries of a KV head.
inline constexpr int kInverseBlocks = 1024;
// A key tile whose list is longer than the total divided by kParts is processed in parts. Parts of
// a list wait for each other. Where the key tiles alone keep the GPU busy, only lists that are
// longer than the total divided by kPartsOfManyTiles are broken up.
inline constexpr int kParts = 1024, kPartsOfManyTiles = 256;
inline constexpr int kMinPartSteps = 8;  // a part has at least this many steps
inline constexpr int kMaxRanges = 16;
// The part of a list in a range has on average at least so many steps. Each part costs reading and
// writing the sums of a key tile, which is as much as the rows of two to four steps.
inline constexpr int kMinRangeSteps = 16;

// Where the lists of all key tiles are, and how they are divided among CTAs. Filled on the GPU.
struct InversePlan {
  unsigned next_item;  // counter of items that CTAs have taken
  unsigned items;
};

// A work item: part `part` of the list of a key tile, `entries` entries from `first` on. A part
// does not extend past its range.
struct InverseItem {
  int64_t first;
  int32_t tile, part, entries;
  bool several;  // the list has several parts
};

// The lists, in the workspace. Key tile i of KV head g in batch entry b has the number
// (b * groups + g) * key_tiles + i. The workspace has 12 bytes for each entry that there may be,
// see max_entries, and less than 4 KiB + 512 bytes for each key tile.
struct InverseLists {
  InversePlan* plan;
  InverseItem* items;  // [kMaxRanges * tiles + kParts]
  int32_t* counts;     // [tiles]: entries of a list
  int64_t* starts;     // [tiles]: the first entry of a list
  int32_t* parts;      // [tiles]: parts of a list
  // [tiles, 8]: parts that the warps of the main kernel have added to the sums.
  uint32_t* parts_added;
  // [batch * groups, chunks, key_tiles]: number of entries, then where the next one goes.
  int32_t* cursors;
  int32_t* queries;  // [capacity]
  uint64_t* keys;    // [capacity]: bit i tells whether the query sees key i of the tile
  int64_t tiles;
  int64_t capacity;
  int64_t bytes;  // of all arrays
  int key_tiles, chunks;

  // `query_tiles` is the number of tiles of TileLists per batch entry and KV head.
  InverseLists(const SparseAttentionBwdParams& p, int64_t query_tiles, void* workspace) {
    const int64_t pairs = p.batch * p.groups;
    key_tiles = static_cast<int>(ceil_div(p.keys, int64_t{kTile}));
    tiles = pairs * key_tiles;
    // A chunk has at least two tiles, so that its counters cost less.
    chunks = static_cast<int>(std::clamp(kInverseBlocks / std::max(pairs, int64_t{1}), int64_t{1},
                                         std::max(query_tiles / 2, int64_t{1})));
    capacity = pairs * p.queries * max_entries(p);
    int64_t at = 0;
    const auto take = [&]<typename T>(T*& array, int64_t size) {
      array = reinterpret_cast<T*>(static_cast<char*>(workspace) + at);
      at += ceil_div(size * int64_t{sizeof(T)}, int64_t{128}) * 128;
    };
    take(plan, 1);
    take(items, kMaxRanges * tiles + kParts);
    take(counts, tiles);
    take(starts, tiles);
    take(parts, tiles);
    take(parts_added, tiles * 8);
    take(cursors, tiles * chunks);
    take(queries, capacity);
    take(keys, capacity);
    bytes = at;
  }

  // Returns how many entries a query and KV head have at most: one per block and key tile.
  static int64_t max_entries(const SparseAttentionBwdParams& p) {
    const SparseAttentionLists& x = p.lists;
    const int64_t blocks = int64_t{x.slots} + ForcedBlocks(p).count();
    const int tiles = ceil_div(x.block_size, kTile);
    return blocks * (x.starts && x.block_size > 1 ? tiles + 1 : tiles);
  }
};

// Visits the entries of all queries of a chunk. Without kFill it counts them, with kFill it writes
// them. Queries come in ascending order: the CTA finishes a tile of TileLists before the next one,
// and within a tile, a warp processes all queries that see a key tile.
template <bool kFill>
__global__ void __launch_bounds__(kInverseThreads)
    inverse_kernel(const __grid_constant__ SparseAttentionBwdParams p,
                   const __grid_constant__ TileLists unions,
                   const __grid_constant__ InverseLists inverse) {
  constexpr int kAtOnce = 8;  // entries of a union whose key tiles a warp looks up together
  auto& ends = dynamic_shared<int[kMaxTileQueries]>();
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int64_t pair = blockIdx.x / inverse.chunks, chunk = blockIdx.x % inverse.chunks;
  const int64_t first_tile = chunk * unions.tiles / inverse.chunks;
  const int64_t last_tile = (chunk + 1) * unions.tiles / inverse.chunks;
  int32_t* const cursors = inverse.cursors + int64_t{blockIdx.x} * inverse.key_tiles;
  const int block_size = p.lists.block_size;

  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    const int64_t index = pair * unions.tiles + tile;
    const int32_t* const rows = unions.rows + index * unions.capacity;
    const uint32_t* const words = unions.queries + index * unions.capacity * unions.words;
    const int count = unions.counts[index];
    const int64_t first_query = tile * unions.tile_queries;
    __syncthreads();
    for (int i = thread_index(); i < unions.tile_queries; i += kInverseThreads) {
      ends[i] = first_query + i < p.queries
                    ? key_end(p.lists, pair / p.groups * p.queries + first_query + i, p.keys)
                    : 0;
    }
    __syncthreads();

    // Visits the entries of key tile `key_tile`, whose blocks start at entry `entry` of the union.
    const auto visit = [&](int entry, int key_tile) {
      const int first_key = key_tile * kTile;
      for (int word = 0; word < unions.words; ++word) {
        const int i = word * 32 + lane, end = i < unions.tile_queries ? ends[i] : 0;
        // Calls emit(mask) for each entry of this lane's query but the last, whose mask it returns.
        const auto for_each_mask = [&](auto emit) {
          uint64_t mask = 0;
          for (int x = entry; x < count; ++x) {
            const int row = rows[x];
            if (row >= first_key + kTile) break;
            const int low = max(row - first_key, 0);
            const int high = min(min(row + block_size, end) - first_key, kTile);
            if (!(words[int64_t{x} * unions.words + word] >> lane & 1) || low >= high) continue;
            const uint64_t keys = ~uint64_t{0} >> (kTile - high + low) << low;
            if (mask & keys) emit(mask), mask = 0;
            mask |= keys;
          }
          return mask;
        };
        int masks = 0;
        const uint64_t last_mask = for_each_mask([&](uint64_t) { ++masks; });
        const bool several = masks > 0;
        masks += last_mask != 0;
        const int sum = inclusive_scan(masks), all = __shfl_sync(~0u, sum, 31);
        if (all == 0) continue;
        int at = 0;
        if (lane == 0) at = atomicAdd(&cursors[key_tile], all);
        if constexpr (kFill) {
          at = __shfl_sync(~0u, at, 0) + sum - masks;
          int64_t to = inverse.starts[pair * inverse.key_tiles + key_tile] + at;
          const auto write = [&](uint64_t mask) {
            inverse.queries[to] = static_cast<int32_t>(first_query + i), inverse.keys[to] = mask;
            ++to;
          };
          if (several) for_each_mask(write);
          if (last_mask != 0) write(last_mask);
        }
      }
    };

    for (int base = warp * kAtOnce; base < count; base += kInverseThreads / 32 * kAtOnce) {
      // The key tiles of this lane's entry to which no earlier entry belongs.
      int first = 0, last = -1;
      if (lane < kAtOnce && base + lane < count) {
        const int row = rows[base + lane];
        first = row / kTile;
        last = min((row + block_size - 1) / kTile, inverse.key_tiles - 1);
        if (base + lane > 0)
          first = max(first, (rows[base + lane - 1] + block_size - 1) / kTile + 1);
      }
      for (uint32_t left = __ballot_sync(~0u, first <= last); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int stop = __shfl_sync(~0u, last, from);
        for (int i = __shfl_sync(~0u, first, from); i <= stop; ++i) visit(base + from, i);
      }
    }
  }
}

// Turns the counts of a key tile's chunks into places within its list. One thread per key tile.
__global__ void __launch_bounds__(kInverseThreads)
    chunk_sums_kernel(const __grid_constant__ InverseLists inverse) {
  const int64_t tile = int64_t{blockIdx.x} * kInverseThreads + thread_index();
  if (tile >= inverse.tiles) return;
  const int64_t pair = tile / inverse.key_tiles, key_tile = tile % inverse.key_tiles;
  int32_t* const cursors = inverse.cursors + pair * inverse.chunks * inverse.key_tiles + key_tile;
  constexpr int kAtOnce = 16;  // counts that are loaded together
  int sum = 0;
  for (int first = 0; first < inverse.chunks; first += kAtOnce) {
    int counts[kAtOnce];
    const auto at = [&](int i) { return cursors + int64_t{first + i} * inverse.key_tiles; };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) counts[i] = first + i < inverse.chunks ? *at(i) : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < inverse.chunks) *at(i) = sum;
      sum += counts[i];
    }
  }
  inverse.counts[tile] = sum;
}

// One CTA finds where the lists start, and divides them into work items. A step of the main kernel
// has `step_entries` entries. There are up to `max_ranges` ranges of queries.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ InverseLists inverse, int step_entries, int max_ranges) {
  auto& warp_sums = dynamic_shared<int64_t[kPlanThreads / 32]>();
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  // Adds up value(tile) of all key tiles. Calls visit(tile, before) for each, where `before` is
  // `start` plus the sum of the tiles before it. Returns `start` plus the sum of all tiles. The
  // same thread has a tile in every call.
  const auto scan = [&](int64_t start, auto value, auto visit) {
    int64_t before = start;
    for (int64_t first = 0; first < inverse.tiles; first += kPlanThreads) {
      const int64_t tile = first + thread_index();
      const int64_t x = tile < inverse.tiles ? value(tile) : 0;
      const int64_t sum = inclusive_scan(x);
      if (lane == 31) warp_sums[warp] = sum;
      __syncthreads();
      int64_t earlier = before;
      for (int i = 0; i < kPlanThreads / 32; ++i) {
        if (i < warp) earlier += warp_sums[i];
        before += warp_sums[i];
      }
      if (tile < inverse.tiles) visit(tile, earlier + sum - x);
      __syncthreads();
    }
    return before;
  };

  const int64_t entries = scan(
      0, [&](int64_t tile) { return int64_t{inverse.counts[tile]}; },
      [&](int64_t tile, int64_t before) {
        inverse.starts[tile] = before;
        inverse.parts[tile] = 0;
        for (int i = 0; i < 8; ++i) inverse.parts_added[tile * 8 + i] = 0;
      });
  const int64_t most_parts = inverse.tiles < kParts ? kParts : kPartsOfManyTiles;
  const int64_t steps =
      max(ceil_div(ceil_div(entries, int64_t{step_entries}), most_parts), int64_t{kMinPartSteps});
  const int part_entries = static_cast<int>(steps * step_entries);
  const int64_t full_ranges = entries / (inverse.tiles * kMinRangeSteps * step_entries);
  const int ranges = static_cast<int>(max(min(full_ranges, int64_t{max_ranges}), int64_t{1}));
  // Returns the number of entries in the list of a key tile before a range.
  const auto entries_before = [&](int64_t tile, int range) {
    if (range == ranges) return inverse.counts[tile];
    const int64_t chunk =
        tile / inverse.key_tiles * inverse.chunks + int64_t{range} * inverse.chunks / ranges;
    return inverse.cursors[chunk * inverse.key_tiles + tile % inverse.key_tiles];
  };
  int64_t items = 0;
  for (int range = 0; range < ranges; ++range) {
    // A list without entries has an item in the first range, which writes zeros.
    const auto parts = [&](int64_t tile) {
      const int count = entries_before(tile, range + 1) - entries_before(tile, range);
      return ceil_div(count, part_entries) + (range == 0 && inverse.counts[tile] == 0);
    };
    items = scan(
        items, [&](int64_t tile) { return int64_t{parts(tile)}; },
        [&](int64_t tile, int64_t before) {
          const int count = inverse.counts[tile], number = parts(tile);
          const int end = entries_before(tile, range + 1), before_range = inverse.parts[tile];
          int first = entries_before(tile, range);
          for (int i = 0; i < number; ++i, first += part_entries) {
            const int own = min(end - first, part_entries);
            inverse.items[before + i] = {inverse.starts[tile] + first, static_cast<int32_t>(tile),
                                         before_range + i, own, own < count};
          }
          inverse.parts[tile] = before_range + number;
        });
  }
  if (thread_index() == 0) *inverse.plan = {0, static_cast<unsigned>(items)};
}

}  // namespace jax_dsa::sparse_attention
