// What the kernels of the backward pass share. docs/design/htree.md describes the pass.
//
//   P  = exp(S - m - log l)     dS = P * (dP - delta)          dP = dO V^T
//   dV = P^T dO                 dK = scale * dS^T Q            dQ = scale * dS K
//
// dQ comes from a walk like that of the attention. A query visits a block of the tree if any of
// the block's nodes counts in its softmax. The gradients of nodes are sums over the visits of
// their block. For each block there is a list of visits in a fixed order, cut into segments. One
// warp after another adds its segment to the block's gradients, always in the same order.
#pragma once

#include "htree/walk.cuh"

namespace jax_dsa::htree {

// Returns two packed bf16 numbers, multiplied by a power of two.
__device__ __forceinline__ uint32_t scaled_bf16(uint32_t packed, float factor) {
  const float2 x = unpack_bf16(packed);
  return pack_bf16(x.x * factor, x.y * factor);
}

// A record: one head tile of a query as nodes_kernel reads it. First the queries, then dO, both
// swizzled like a block; then lse of each head in log2 units, then delta. Heads without
// cotangents have zeros, and the lse +inf. Where max_logit exceeds kExactBaseLimit, it is the
// head's base, and lse is only log_sum; other heads have a base of 0. `exact` is whether any head
// has a base.
template <int kD>
struct Record {
  static constexpr int kRows = kTileHeads * kD * 2;  // bytes of the queries
  static constexpr int kLse = 2 * kRows;             // byte offset
  static constexpr int kDelta = kLse + kTileHeads * 4;
  static constexpr int kBase = kDelta + kTileHeads * 4;
  static constexpr int kExact = kBase + kTileHeads * 4;
  static constexpr int kBytes = kExact + 64;  // a multiple of 128
};

// A visit of a block by a head tile of a query.
struct Visit {
  uint32_t record_and_rotation;  // low 16 bits: number of the record; high 16 bits: rotation of the
                                 // query
  uint32_t masked;               // bit i: row i of the block is masked
};

// A work tile: at most kSegment visits of one block.
struct WorkTile {
  int32_t list, segment;
};
inline constexpr int kSegment = 256;

struct BwdPlan {
  Plan plan;
  const void* out;
  const float* max_logit;
  const float* log_sum;
  const void* dout;
  const float* dlse;
  void* dq;
  // dO and delta are multiplied by `first_factor` when they are loaded, because sums without the
  // scale could overflow where the gradients do not. It is a power of two, which costs no digits.
  // dQ and dK are multiplied by `last_factor` in the end, and dV is divided by `first_factor`.
  float first_factor, last_factor;
  float* gradients;  // of the tree, in its layout but not swizzled, without the last factors

  // For the chunk. There is a list for each block of the tree of each batch entry and group.
  uint8_t* records;  // [batch entry and group, query, head tile]
  int words;         // words of marks per list
  uint32_t* marks;   // [lists, words]: bit i of word w says that query 32 w + i visits the block
  uint16_t* marks_before;  // [lists, words]: number of marks in the words before
  int32_t* counts;         // [lists]: number of queries
  int32_t* starts;         // [lists]: number of queries in the lists before
  Visit* visits;
  WorkTile* work_tiles;    // first segments of all lists, then second segments, ...
  uint32_t* tile_counter;  // [0]: next tile index (atomic), [1]: number of work tiles
  uint32_t* done;          // [lists, key tiles per block]: number of segments added so far

  __host__ __device__ int64_t trees() const { return plan.chunk.batch * plan.p.groups; }
  __host__ __device__ int64_t lists() const { return trees() * plan.layers.blocks; }
};

// Rows of a key tile, which a warp handles at a time.
template <int kR>
inline constexpr int kBwdTileRows = kR < 16 ? kR : 16;
template <int kR>
inline constexpr int kBwdTilesPerBlock = kR / kBwdTileRows<kR>;

}  // namespace jax_dsa::htree
