// The walk of a tile of queries over the union of its lists. A step is a tile of kKeys keys: a part
// of one block, or several blocks.
#pragma once

#include "common/copy.cuh"
#include "masked_attention/mask.cuh"
#include "sparse_attention/lists.cuh"
#include "sparse_attention/rows.cuh"

namespace jax_dsa::sparse_attention {

// The steps of a work tile. Divisions by the block size, a power of two, are shifts.
template <int kKeys>
struct Steps {
  const int32_t* rows;
  const uint32_t* queries;
  int entries = 0;
  int block_shift;  // log2 of the block size
  int box_shift;    // log2 of the number of keys that lie together in memory

  __device__ explicit Steps(int block_size)
      : block_shift(log2_of(block_size)), box_shift(log2_of(min(block_size, kKeys))) {}
  __device__ void start(const TileLists& lists, int groups, const WorkTile& x) {
    const int64_t index =
        (int64_t{x.batch} * groups + x.head) * lists.tiles + x.query / lists.tile_queries;
    rows = lists.rows + index * lists.capacity;
    queries = lists.queries + index * lists.capacity * lists.words;
    entries = __ldg(lists.counts + index);
  }
  __device__ int keys() const { return entries << block_shift; }  // of the union
  // The entry of key `key` of the union.
  __device__ int entry(int key) const { return key >> block_shift; }
  // Returns the row of k of key `key`, or a row from `none` on after the last entry.
  __device__ int row(int key, int none) const {
    const int at = entry(key);
    return load_now(rows + at, at < entries, none) + (key & ((1 << block_shift) - 1));
  }
};

// Returns which of 32 keys of a step this lane's query sees, which sees no row from `end` on. The
// keys are those of `boxes` boxes with `width` rows each. Lane i has the first row of box i and the
// queries that see its block. Called by a warp.
__device__ __forceinline__ uint32_t word_bits(uint32_t sees, int row, int end, int boxes,
                                              int width) {
  const int lane = threadIdx.x % 32;
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < boxes; ++i) {
    const uint32_t by = __shfl_sync(~0u, sees, i);
    const int keys = min(end - __shfl_sync(~0u, row, i), width);
    if (by >> lane & 1) bits |= masked_attention::low_bits(keys) << i * width % 32;
  }
  return bits;
}

}  // namespace jax_dsa::sparse_attention
