// Work tiles of the kernels that walk over the keys of a tile of queries. The MMA rows of a tile
// are the heads of one KV head, for each of its queries: row = query * heads + head.
#pragma once

#include <cstdint>

#include "common/wgmma.cuh"
#include "masked_attention/fwd_plan.cuh"
#include "sparse_attention/lists.cuh"

namespace jax_dsa::sparse_attention {

using masked_attention::RowPlace;
using masked_attention::WorkTile;

inline constexpr int kTileRows = 128;  // MMA rows of a work tile

// The parameters of a pass, and the number of queries of a work tile.
template <typename Params>
struct TileCall : Params {
  int tile_queries;
};

// The row of k of each key of the steps in the queue, or a row beyond the keys.
template <int kQueued, int kKeys>
struct KeyRows {
  int32_t rows[kQueued][kKeys];
};

// The queries of a work tile that each of the two MMA warpgroups has. Both can have heads of one.
struct WarpgroupQueries {
  int first_end;     // warpgroup 0 has the queries before this one
  int second_begin;  // warpgroup 1 has the queries from this one on

  // `heads` are those of a KV head.
  __device__ explicit WarpgroupQueries(int heads)
      : first_end(63 / heads + 1), second_begin(64 / heads) {}
  // Returns the warpgroups, one bit each, that have any of some queries. Bit i of `queries` is
  // query first + i.
  __device__ uint32_t warpgroups(uint32_t queries, int first) const {
    return (queries & masked_attention::low_bits(first_end - first) ? 1 : 0) |
           (queries & ~masked_attention::low_bits(second_begin - first) ? 2 : 0);
  }
};

// Sets the scores whose bit is not set to -inf. `first` and `second` hold the bits of the thread's
// two rows.
template <int kScores>
__device__ __forceinline__ void mask_rows(float (&s)[kScores],
                                          const uint32_t (&first)[kScores / 16],
                                          const uint32_t (&second)[kScores / 16]) {
  constexpr int kWords = kScores / 16;
  const int column = threadIdx.x % 4 * 2;
  uint32_t seen[2][kWords];
  uint32_t all = ~0u;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    all &= first[w] & second[w];
    seen[0][w] = first[w] >> column, seen[1][w] = second[w] >> column;
  }
  if (__all_sync(~0u, all == ~0u)) return;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (!(seen[i / 2 % 2][i / 16] >> (i % 16 / 4 * 8 + i % 2) & 1)) s[i] = -INFINITY;
  }
}

// Writes zeros to an array in shared memory, by all threads of the CTA.
template <int kBlocks, int kBytes>
__device__ void clear_shared(uint8_t (&x)[kBlocks][kBytes]) {
  const uint32_t zero[4] = {0, 0, 0, 0};
  for (int i = threadIdx.x; i < kBlocks * kBytes / 16; i += blockDim.x) {
    store_shared_16(smem_address(x) + i * 16, zero);
  }
  fence_async_proxy();
}

// A thread's rows of a work tile, `row` and row + 8.
struct HeadRows {
  int row;
  int bits[2];  // their queries in the tile, or the last query for rows beyond it

  template <typename Params>
  __device__ HeadRows(const Params& p, int row) : row(row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bits[r] = min((row + 8 * r) / (p.heads / p.groups), p.tile_queries - 1);
    }
  }
  template <int kScores>
  __device__ void mask(float (&s)[kScores], const uint32_t (*query_bits)[kScores / 16]) const {
    mask_rows(s, query_bits[bits[0]], query_bits[bits[1]]);
  }
  template <typename Params>
  __device__ int head(const Params& p, const WorkTile& x, int r) const {
    const int heads = p.heads / p.groups;
    return x.head * heads + (row + 8 * r) % heads;
  }
  template <typename Params>
  __device__ RowPlace place(const Params& p, const WorkTile& x) const {
    const int heads = p.heads / p.groups;
    const int rows = static_cast<int>(min(p.queries - x.query, int64_t{p.tile_queries})) * heads;
    const auto at = [&](int r) {
      const int64_t query = int64_t{x.batch} * p.queries + x.query + (row + 8 * r) / heads;
      return query * p.heads + head(p, x, r);
    };
    return {at(0), at(1) - at(0), rows - row};
  }
};

}  // namespace jax_dsa::sparse_attention
