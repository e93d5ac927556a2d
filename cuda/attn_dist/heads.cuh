// A tile of 64 heads in the registers of a warpgroup: its products with tiles of 64 keys, and sums
// over its rows of the powers of scores.
//
// A thread has 2 rows and 16 columns of a product. Adding its rows leaves 16 values, one a column;
// in three exchanges between lanes that differ in their rows each passes on half of its columns,
// until a lane has two columns of the warp's 16 rows.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/wgmma.cuh"

namespace jax_dsa::attn_dist {

// Loads the head tile at `tile` in shared memory; wait() comes before the blocks from kFirstPart
// on.
template <int kD, int kFirstPart, typename Wait>
__device__ __forceinline__ void load_heads(uint32_t (&q)[kD / 16][4], uint32_t tile, Wait wait) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t from = tile + (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int i = 0; i < kD / 16; ++i) {
    if (i == kFirstPart * 4) wait();
    const int chunk = (i % 4 * 2 + lane / 16) ^ (lane % 8);
    load_matrix_x4(from + i / 4 * kBlockBytes + chunk * 16, q[i]);
  }
}

// Starts the product with the key tile at `tile`. pass_on() lets another warpgroup's first product
// queue behind the last ones here.
template <int kD, int kFirstPart, typename Wait, typename PassOn>
__device__ __forceinline__ void multiply_heads(float (&s)[32], const uint32_t (&q)[kD / 16][4],
                                               uint32_t tile, Wait wait, PassOn pass_on) {
  const uint64_t keys = k_major_descriptor(tile);
#pragma unroll
  for (int i = 0; i < kD / 16; ++i) {
    if (i == kFirstPart * 4) wait();
    if (i % (kFirstPart * 4) == 0) wgmma_fence();
    wgmma_bf16<kKMajor>(s, q[i], keys + i / 4 * (kBlockBytes / 16) + i % 4 * 2, i > 0);
    if (i == kD / 16 - 3) pass_on();
  }
  wgmma_commit();
}

// Adds what lanes that differ in the bit 2 * kHalf have of the first 2 * kHalf sums: the lower lane
// gets the first half of them, the upper one the second.
template <int kHalf>
__device__ __forceinline__ void exchange_half(float (&sum)[16]) {
  const bool upper = threadIdx.x & (2 * kHalf);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float passed = upper ? sum[i] : sum[i + kHalf];
    const float kept = upper ? sum[i + kHalf] : sum[i];
    sum[i] = kept + __shfl_xor_sync(~0u, passed, 2 * kHalf);
  }
}

// This lane's columns 2 * lane + {0, 1} of the sum over the warp's rows of exp2(scores).
__device__ __forceinline__ float2 sum_rows(float (&s)[32], float scale_log2,
                                           const float (&offset)[2]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = exp2_approx(fmaf(s[i], scale_log2, offset[i / 2 % 2]));
  const bool off[2] = {offset[0] == -INFINITY, offset[1] == -INFINITY};
  if (__any_sync(~0u, off[0] || off[1])) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = off[i / 2 % 2] ? 0.f : s[i];
  }
  float sum[16];  // by column: 8 * (i / 2) + 2 * (lane % 4) + i % 2
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i] = s[i / 2 * 4 + i % 2] + s[i / 2 * 4 + 2 + i % 2];
  exchange_half<8>(sum);
  exchange_half<4>(sum);
  exchange_half<2>(sum);
  return make_float2(sum[0], sum[1]);
}

template <int kWarps>
__device__ __forceinline__ float sum_warps(const float* sums) {
  float x[kWarps];
#pragma unroll
  for (int i = 0; i < kWarps; ++i) x[i] = sums[i * kTile];
  float total = x[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) total += x[i];
  return total;
}
__device__ __forceinline__ float sum_warps(const float* sums, int warps) {
  return warps == 4   ? sum_warps<4>(sums)
         : warps == 8 ? sum_warps<8>(sums)
         : warps == 2 ? sum_warps<2>(sums)
                      : sum_warps<1>(sums);
}

}  // namespace jax_dsa::attn_dist
