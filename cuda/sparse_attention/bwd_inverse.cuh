// Inverse lists of sparse attention: per tile of keys, the queries that see keys of it.
//
// Key tile i consists of the rows 64 i to 64 i + 63 of k, of one batch entry and KV head, whatever
// the blocks are. An entry of its list is a query and a mask of the keys that the query sees. The
// blocks of a query in the tile share an entry, unless they have a key in common.
//
// Where every block is a tile of 128 keys, tiles have 128 keys, too. An entry is then a query and
// the number of keys that it sees, because these are always the first ones of the tile.
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
  // [capacity]: bit i tells whether the query sees key i of the tile. With tiles of 128 keys: the
  // number of keys that it sees.
  uint64_t* keys;
  int64_t tiles;
  int64_t capacity;
  int64_t bytes;  // of all arrays
  int tile_keys;  // keys of a tile: 64 or 128
  int key_tiles, chunks;

  // `query_tiles` is the number of tiles of TileLists per batch entry and KV head.
  InverseLists(const SparseAttentionBwdParams& p, int64_t query_tiles, int tile_keys,
               void* workspace)
      : tile_keys(tile_keys) {
    const int64_t pairs = p.batch * p.groups;
    key_tiles = static_cast<int>(ceil_div(p.keys, int64_t{tile_keys}));
    tiles = pairs * key_tiles;
    // A chunk has at least two tiles, so that its counters cost less.
    chunks = static_cast<int>(std::clamp(kInverseBlocks / std::max(pairs, int64_t{1}), int64_t{1},
                                         std::max(query_tiles / 2, int64_t{1})));
    capacity = pairs * p.queries * max_entries(p, tile_keys);
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
  static int64_t max_entries(const SparseAttentionBwdParams& p, int tile_keys) {
    const SparseAttentionLists& x = p.lists;
    const int64_t blocks = int64_t{x.slots} + ForcedBlocks(p).count();
    const int tiles = ceil_div(x.block_size, tile_keys);
    return blocks * (x.starts && x.block_size > 1 ? tiles + 1 : tiles);
  }
};

// The arrays in the workspace of the backward pass.
struct BwdWorkspace {
  float* delta;  // [batch, queries, heads]
  TileLists unions;
  InverseLists inverse;
  unsigned* dq_tile_counter;
  int64_t bytes;

  BwdWorkspace(const SparseAttentionBwdParams& p, int tile_queries, int tile_keys)
      : delta(static_cast<float*>(p.workspace)),
        unions(tile_lists(p, tile_queries, static_cast<char*>(p.workspace) + delta_bytes(p))),
        inverse(
            p, unions.tiles, tile_keys,
            static_cast<char*>(p.workspace) + delta_bytes(p) + tile_lists_bytes(p, tile_queries)) {
    const int64_t lists_end = delta_bytes(p) + tile_lists_bytes(p, tile_queries) + inverse.bytes;
    dq_tile_counter = reinterpret_cast<unsigned*>(static_cast<char*>(p.workspace) + lists_end);
    bytes = lists_end + 16;
  }

  static int64_t delta_bytes(const SparseAttentionBwdParams& p) {
    return ceil_div(p.batch * p.queries * p.heads, int64_t{4}) * 16;
  }
};

// Launches the kernels that compute delta.
cudaError_t compute_delta(const SparseAttentionBwdParams& p, float* delta, cudaStream_t stream);

// Launches the kernels that build the inverse lists from the unions. A step of the main kernel has
// `step_entries` entries.
cudaError_t build_inverse_lists(const SparseAttentionBwdParams& p, const BwdWorkspace& w,
                                int step_entries, cudaStream_t stream);

}  // namespace jax_dsa::sparse_attention
