// Sums of bias gradients in the portable masked attention backward kernel, for biases that several
// scores share. See portable_bwd.cuh.
#pragma once

#include "masked_attention/bwd_bias.cuh"

namespace jax_dsa::masked_attention {

// Returns the distance of two rows of sums, in floats. See num_bias_sums.
__host__ __device__ inline int64_t bias_sums_row(int64_t keys) { return bias_key_boxes(keys) * 64; }

// Adds a warp's dS, from `query` and `key` on, to the sums: rows of floats, or one row per head if
// all queries share a row of biases.
template <int kM, int kScores>
__device__ __forceinline__ void add_bias_gradients(const MaskedAttentionBwdParams& p, float* sums,
                                                   int batch, int head, int query, int key,
                                                   const float (&ds)[kM][kScores]) {
  const AttentionBias& b = p.bias;
  const int64_t row = int64_t{b.batch == 1 ? 0 : batch} * b.heads + head / (p.heads / b.heads);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int own = key + n * 8 + lane % 4 * 2 + c;
      if (b.queries > 1) {
#pragma unroll
        for (int j = 0; j < 2 * kM; ++j) {
          const int64_t t = query + j * 8 + lane / 4;
          if (own < p.keys && t < p.queries) {
            atomicAdd(sums + (row * p.queries + t) * bias_sums_row(p.keys) + own,
                      ds[j / 2][n * 4 + j % 2 * 2 + c]);
          }
        }
        continue;
      }
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 2 * kM; ++j) sum += ds[j / 2][n * 4 + j % 2 * 2 + c];
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (lane < 4 && own < p.keys) atomicAdd(sums + row * p.keys + own, sum);
    }
  }
}

// Rounds the sums of biases with one row per query; one thread per bias.
template <DType kType>
static __global__ void __launch_bounds__(kBiasKeysThreads)
    bias_rows_kernel(const __grid_constant__ MaskedAttentionBwdParams p, const float* sums) {
  const int64_t at = int64_t{blockIdx.x} * kBiasKeysThreads + threadIdx.x;
  const int64_t width = bias_row(p.keys), row = at / width, key = at - row * width;
  if (row >= int64_t{p.bias.batch} * p.bias.heads * p.queries) return;
  static_cast<uint16_t*>(p.dbias)[at] = static_cast<uint16_t>(
      pack_16<kType>(key < p.keys ? sums[row * bias_sums_row(p.keys) + key] : 0.f, 0.f));
}

}  // namespace jax_dsa::masked_attention
