// Loads tiles of biases, for both passes. A tile consists of boxes of 64 keys, with one row per
// query or one row that all queries share. See AttentionBias.
#pragma once

#include <cstdint>

#include "common/ring.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "masked_attention/masked_attention.h"

namespace jax_dsa::masked_attention {

// Shared-memory buffers for tiles of kQueries queries by kBoxes * 64 keys, aligned like wgmma
// operands. The specialization without buffers takes no space.
template <int kBuffers, int kQueries, int kBoxes>
struct BiasBuffers {
  uint8_t tile[kBuffers][kBoxes][kQueries * 128];
  uint64_t full[kBuffers], free[kBuffers];
};
template <int kQueries, int kBoxes>
struct BiasBuffers<0, kQueries, kBoxes> {};

__host__ __device__ inline int64_t bias_row(int64_t keys) { return ceil_div(keys, int64_t{8}) * 8; }

// Loads the biases of one head for the queries from `query` on and the keys from `key` on. One
// thread calls this.
template <int kBuffers, int kQueries, int kBoxes>
__device__ __forceinline__ void load_bias(const AttentionBias& bias, const CUtensorMap& map,
                                          BiasBuffers<kBuffers, kQueries, kBoxes>& buffers, int at,
                                          int batch, int head, int heads, int query, int key) {
  const bool shared_row = bias.queries == 1;
  mbarrier_arrive_expect(&buffers.full[at], (shared_row ? 1 : kQueries) * kBoxes * 128);
  for (int box = 0; box < kBoxes; ++box) {
    tma_load(buffers.tile[at][box], &map, &buffers.full[at], key + box * 64, shared_row ? 0 : query,
             head / (heads / bias.heads), bias.batch == 1 ? 0 : batch);
  }
}

// Computes s = scale * s + bias. `load(k, x)` loads the biases of 16 columns of the scores in the
// order of the accumulator fragment.
template <DType kType, int kScores, typename Load>
__device__ __forceinline__ void add_bias(float (&s)[kScores], float scale, Load load) {
#pragma unroll
  for (int k = 0; k < kScores / 8; ++k) {
    uint32_t x[4];
    load(k, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 y = unpack_16<kType>(x[j]);
      const int i = 8 * k + 2 * j;
      s[i] = fmaf(s[i], scale, y.x), s[i + 1] = fmaf(s[i + 1], scale, y.y);
    }
  }
}

// Returns the address of 16-byte chunk `chunk` of the row of query `query` (swizzled).
__device__ __forceinline__ uint32_t bias_chunk(uint32_t box, bool shared_row, int query,
                                               int chunk) {
  const int row = shared_row ? 0 : query;
  return box + row * 128 + (chunk ^ (row % 8)) * 16;
}

}  // namespace jax_dsa::masked_attention
