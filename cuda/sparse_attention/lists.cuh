// Lists of the blocks of keys that a tile of neighbouring queries needs.
//
// Queries that are next to each other see mostly the same blocks. A tile of queries therefore walks
// over the union of their lists, and one bit per query tells who sees a block. A kernel makes these
// unions before the main kernels run. The entries of a tile are in ascending order of rows of k. A
// block that one query names several times has an entry of its own for each further time.
#pragma once

#include <cstdint>

#include "sparse_attention/sparse_attention.h"

namespace jax_dsa::sparse_attention {

// The unions of all tiles of `tile_queries` consecutive queries of one batch entry and KV head.
// Tile t of KV head g in batch entry b has the index (b * groups + g) * tiles + t.
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

}  // namespace jax_dsa::sparse_attention
