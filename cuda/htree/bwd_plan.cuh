// What the passes of the backward share. See docs/design/htree.md.
//
// Queries' gradients are made by a walk like the attention's. Those of nodes are sums over the
// queries that meet a block: for each block of the tree there is a list of them, in order, so that
// one warp after the other adds to its gradients, always in the same order.
#pragma once

#include "htree/walk.cuh"

namespace jax_dsa::htree {

// 16 heads of a query as the gradients of nodes meet them, swizzled like a block: queries, then
// the outputs' gradients; of each head the lse in log2 units, then delta. A head without
// cotangents has zeros, and the lse +inf.
template <int kD>
struct Record {
  static constexpr int kRows = kTileHeads * kD * 2;  // bytes of the queries
  static constexpr int kLse = 2 * kRows;             // where that is
  static constexpr int kDelta = kLse + kTileHeads * 4;
  static constexpr int kBytes = kDelta + kTileHeads * 4;
};

// That a query meets a block.
struct Visit {
  uint32_t record_and_rotation;  // lower half: number of the record; upper half: by which the query
                                 // is rotated
  uint32_t masked;               // bit i: row i of the block does not count
};

// At most so many meetings of a block, by one warp.
struct WorkTile {
  int32_t list, segment;
};
inline constexpr int kSegment = 256;

struct BwdPlan {
  Plan plan;
  const void* out;
  const float* lse;
  const void* dout;
  const float* dlse;
  void* dq;
  float* gradients;  // of the tree, in its order but not swizzled; of keys without the scale

  // Of the chunk. A list is of a block of the tree of a batch entry and group.
  uint8_t* records;        // [batch entry and group, query, part]
  int words;               // of marks, of a list
  uint32_t* marks;         // [lists, words]: bit i of word w: query 32 w + i meets the block
  uint16_t* marks_before;  // [lists, words]: how many marks there are in the words before
  int32_t* counts;         // [lists]: queries
  int32_t* starts;         // [lists]: the same of the lists before
  Visit* visits;
  WorkTile* work_tiles;    // first segments of all lists, then second ones, ...
  uint32_t* tile_counter;  // item; [0]: how many are taken, [1]: how many there are
  uint32_t* done;          // [lists, units]: segments that have been added

  __host__ __device__ int64_t trees() const { return plan.chunk.batch * plan.p.groups; }
  __host__ __device__ int64_t lists() const { return trees() * plan.layers.blocks; }
};

// Rows of a block that a warp has at a time.
template <int kR>
inline constexpr int kBwdTileRows = kR < 16 ? kR : 16;
template <int kR>
inline constexpr int kBwdTilesPerBlock = kR / kBwdTileRows<kR>;

}  // namespace jax_dsa::htree
