// The sums over heads of the indexer's portable kernels.
#pragma once

#include "indexer/portable_products.cuh"

namespace jax_dsa::indexer {

// Returns the number of heads that a query has in a tile.
__host__ __device__ constexpr int padded_heads(int heads) {
  return ceil_div(heads, kPairRows) * kPairRows;
}

// Sums of a query for the keys that a warp holds. A lane has two of them in the end.
struct HeadSums {
  float x[kHeldRows / 16][2] = {};

  // Adds the products d of 16 heads, whose weights are in shared memory. Products below `floor`
  // count as that.
  __device__ __forceinline__ void add(const float (&d)[kHeldRows / 16][8], const float* weights,
                                      float floor) {
    const int column = (thread_index() & 3) * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 w = *reinterpret_cast<const float2*>(weights + 8 * i + column);
#pragma unroll
      for (int m = 0; m < kHeldRows / 16; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          x[m][r] = fmaf(w.x, max_nan(d[m][4 * i + 2 * r], floor), x[m][r]);
          x[m][r] = fmaf(w.y, max_nan(d[m][4 * i + 2 * r + 1], floor), x[m][r]);
        }
      }
    }
  }

  // Adds up over the four lanes that share keys. `total` gets the sums of held rows own_row(0) and
  // own_row(1).
  __device__ __forceinline__ void reduce(float (&total)[2]) const {
    const bool odd = thread_index() & 1, upper = thread_index() & 2;
    float part[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      part[m] = (odd ? x[m][1] : x[m][0]) + __shfl_xor_sync(~0u, odd ? x[m][0] : x[m][1], 1);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] =
          (upper ? part[2 + i] : part[i]) + __shfl_xor_sync(~0u, upper ? part[i] : part[2 + i], 2);
    }
  }
};

// Returns the sums of one query, whose heads are in the tile from row `first` on. All products of a
// query are added in this order, so that a logit has the same bits in every kernel.
template <typename Tr>
__device__ __forceinline__ void score_keys(const HeldRows<Tr>& held, uint32_t tile,
                                           const float* weights, int first, int heads, float floor,
                                           float (&total)[2]) {
  HeadSums sums;
#pragma unroll 1
  for (int pair = 0; pair < heads / kPairRows; ++pair) {
    float d[kHeldRows / 16][8];
    multiply_held(d, held, tile, first / kPairRows + pair);
    sums.add(d, weights + first + pair * kPairRows, floor);
  }
  sums.reduce(total);
}

// Issues the copies of the heads of up to `count` queries into a tile and of their weights.
template <typename Tr>
__device__ __forceinline__ void load_heads(const IndexerFwdParams& p, int64_t token, int queries,
                                           int count, uint32_t tile, float* weights) {
  const int padded = padded_heads(p.heads), row = thread_index() / 8, chunk = thread_index() % 8;
  const char* const q = static_cast<const char*>(p.q);
#pragma unroll
  for (int i = 0; i < kTileRows; i += kPortableThreads / 8) {
    const int query = i / padded, head = i % padded + row;
    if (query >= queries) break;
    const bool exists = query < count && head < p.heads;
    const int64_t at = (token + query) * p.heads + head;
    copy_chunk<Tr, kTileRows>(tile, i + row, chunk, exists ? q + at * Tr::kChannelBytes : nullptr,
                              q);
  }
  const int column = thread_index(), query = column / padded, head = column % padded;
  if (column < kTileRows) {
    const bool exists = query < count && head < p.heads;
    cp_async_4(smem_address(weights + column),
               p.weights + (exists ? (token + query) * p.heads + head : 0), exists);
  }
}

}  // namespace jax_dsa::indexer
