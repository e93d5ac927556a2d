// Bias gradients, which are dS, in the masked attention backward kernel. A gradient overwrites its
// bias in shared memory and is stored from there, or is summed over all scores that share the bias.
// See bwd.cuh.
#pragma once

#include "common/tma.cuh"
#include "masked_attention/bwd_rows.cuh"

namespace jax_dsa::masked_attention {

// Returns the address that a lane passes to load_matrix_x4_transposed for the biases of 16 keys of
// its warp and 16 queries of a step, or to store_matrix_x4_transposed for their gradients.
template <int kBuffers, int kBoxes>
__device__ __forceinline__ uint32_t
bias_fragment(const BiasBuffers<kBuffers, kStepQueries, kBoxes>& buffers, int at, int box,
              bool shared_row, int k) {
  const int lane = thread_index() & 31, warp = thread_index() >> 5 & 3;
  return bias_chunk(smem_address(buffers.tile[at][box]), shared_row,
                    16 * k + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
}

// Adds the dS fragment of a warpgroup (64 keys from `key` on, 64 queries of a step) to the sums.
template <int kScores>
__device__ __forceinline__ void sum_bias_gradients(const MaskedAttentionBwdParams& p, float* sums,
                                                   int batch, int head, int query, int key,
                                                   const float (&ds)[kScores]) {
  const AttentionBias& b = p.bias;
  const int64_t row = int64_t{b.batch == 1 ? 0 : batch} * b.heads + head / (p.heads / b.heads);
  if (b.queries > 1) {
    add_dq(ds, sums,
           (row * ceil_div(p.queries, int64_t{kStepQueries}) + query / kStepQueries) *
                   bias_key_boxes(p.keys) +
               key / 64);
    return;
  }
  const int lane = thread_index() & 31, own = key + (thread_index() >> 5 & 3) * 16 + lane / 4;
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kScores; ++i) sum[i / 2 % 2] += ds[i];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    if (lane % 4 == 0 && own + r * 8 < p.keys) {
      atomicAdd(sums + row * p.keys + own + r * 8, sum[r]);
    }
  }
}

// Stores a tile of bias gradients, after they have overwritten the biases. One thread calls this.
template <int kBuffers, int kBoxes>
__device__ __forceinline__ void store_bias_gradients(
    const CUtensorMap& map, const BiasBuffers<kBuffers, kStepQueries, kBoxes>& buffers, int at,
    int batch, int head, int query, int key) {
  for (int box = 0; box < kBoxes; ++box) {
    tma_store(&map, buffers.tile[at][box], key + box * 64, query, head, batch);
  }
  bulk_commit();
}

// Rounds sums over heads or batch entries; one CTA per 64 queries by 64 keys.
template <DType kType>
__global__ void __launch_bounds__(128)
    bias_tiles_kernel(const __grid_constant__ MaskedAttentionBwdParams p, const float* sums) {
  const int64_t boxes = bias_key_boxes(p.keys), steps = ceil_div(p.queries, int64_t{kStepQueries});
  const int64_t index = blockIdx.x, tile = index / boxes, row = tile / steps;
  const int64_t key = (index - tile * boxes) * 64, query = (tile - row * steps) * kStepQueries;
  constexpr int kN = kStepQueries / 2;
  const float* const from = dq_fragment<kN, 128>(const_cast<float*>(sums), index);
  auto& stage = dynamic_shared<uint8_t[kStepQueries * 128]>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < kN / 8; ++k) {
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 y = __ldcs(reinterpret_cast<const float4*>(from + (8 * k + 4 * j) * 128));
      x[2 * j] = pack_16<kType>(y.x, y.y), x[2 * j + 1] = pack_16<kType>(y.z, y.w);
    }
    store_matrix_x4_transposed(
        bias_chunk(smem_address(stage), false, 16 * k + lane / 16 * 8 + lane % 8,
                   warp * 2 + lane / 8 % 2),
        x[0], x[1], x[2], x[3]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kStepQueries * 8; i += 128) {
    uint32_t x[4];
    load_shared_16(bias_chunk(smem_address(stage), false, i / 8, i % 8), x);
    store_16(static_cast<uint16_t*>(p.dbias) +
                 (row * p.queries + query + i / 8) * bias_row(p.keys) + key + i % 8 * 8,
             x, query + i / 8 < p.queries && key + i % 8 * 8 < p.keys);
  }
}

inline constexpr int kBiasKeysThreads = 256;

// Rounds sums over queries; one thread per key.
template <DType kType>
static __global__ void __launch_bounds__(kBiasKeysThreads)
    bias_keys_kernel(const __grid_constant__ MaskedAttentionBwdParams p, const float* sums) {
  const int64_t at = int64_t{blockIdx.x} * kBiasKeysThreads + threadIdx.x, row = at / p.keys;
  if (row >= int64_t{p.bias.batch} * p.bias.heads) return;
  static_cast<uint16_t*>(p.dbias)[row * bias_row(p.keys) + (at - row * p.keys)] =
      static_cast<uint16_t>(pack_16<kType>(sums[at], 0.f));
}

}  // namespace jax_dsa::masked_attention
