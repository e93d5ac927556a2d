// A head tile (64 heads) in the registers of a warpgroup: its products with key tiles of 64 keys,
// and sums over its rows of the exponentials of the scores.
//
// A thread holds 2 rows and 16 columns of a product. Adding the rows leaves 16 values, one per
// column. Then lanes that differ in their rows exchange values three times. In each exchange a lane
// passes on half of its columns, until it has two columns of the sum over the warp's 16 rows.
#pragma once

#include <cstdint>

#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/wgmma.cuh"

namespace jax_dsa::attn_dist {

// Runs consume(i) in consumer warpgroups i = 0 and 1, with kConsumer registers per thread, and
// produce() in the producer warpgroup, with kProducer registers.
template <int kConsumer, int kProducer, typename Consume, typename Produce>
__device__ __forceinline__ void run_warpgroups(Consume consume, Produce produce) {
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup < 2) {
    raise_registers<kConsumer>();
    consume(warpgroup);
  } else {
    lower_registers<kProducer>();
    produce();
  }
}

// Loads the head tile at address `tile` of shared memory. Calls wait() before it reads blocks from
// kFirstBlocks on.
template <int kD, int kFirstBlocks, typename Wait>
__device__ __forceinline__ void load_heads(uint32_t (&q)[kD / 16][4], uint32_t tile, Wait wait) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t from = tile + (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int i = 0; i < kD / 16; ++i) {
    if (i == kFirstBlocks * 4) wait();
    const int chunk = (i % 4 * 2 + lane / 16) ^ (lane % 8);
    load_matrix_x4(from + i / 4 * kBlockBytes + chunk * 16, q[i]);
  }
}

// Starts the product with the key tile at address `tile` of shared memory. Calls wait() before it
// reads blocks from kFirstBlocks on, and hand_over() shortly before the last MMAs, so that another
// warpgroup's first MMAs queue behind them.
template <int kD, int kFirstBlocks, typename Wait, typename HandOver>
__device__ __forceinline__ void multiply_heads(float (&s)[32], const uint32_t (&q)[kD / 16][4],
                                               uint32_t tile, Wait wait, HandOver hand_over) {
  const uint64_t keys = k_major_descriptor(tile);
#pragma unroll
  for (int i = 0; i < kD / 16; ++i) {
    if (i == kFirstBlocks * 4) wait();
    if (i % (kFirstBlocks * 4) == 0) wgmma_fence();
    wgmma_bf16<kKMajor>(s, q[i], keys + i / 4 * (kBlockBytes / 16) + i % 4 * 2, i > 0);
    if (i == kD / 16 - 3) hand_over();
  }
  wgmma_commit();
}

// Adds the first 2 * kHalf sums of lanes that differ in bit kBit. The lower lane receives the first
// half of the results, the upper one the second half.
template <int kHalf, int kBit, int kSums>
__device__ __forceinline__ void exchange_half(float (&sum)[kSums]) {
  const bool upper = threadIdx.x & kBit;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float passed = upper ? sum[i] : sum[i + kHalf];
    const float kept = upper ? sum[i + kHalf] : sum[i];
    sum[i] = kept + __shfl_xor_sync(~0u, passed, kBit);
  }
}

// Sums exp2(s * scale_log2 + offset) over the warp's 16 rows. Returns in the first elements of
// `sum` the sums of this lane's columns: 2 * lane + {0, 1} of 64, or the column `half_column`
// of 32. A row whose offset is -inf adds nothing, whatever its scores are.
template <int kScores>
__device__ __forceinline__ void sum_rows(float (&s)[kScores], float scale_log2,
                                         const float (&offset)[2], float (&sum)[kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = exp2_approx(fmaf(s[i], scale_log2, offset[i / 2 % 2]));
  const bool off[2] = {offset[0] == -INFINITY, offset[1] == -INFINITY};
  if (__any_sync(~0u, off[0] || off[1])) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = off[i / 2 % 2] ? 0.f : s[i];
  }
  // Entry i is column 8 * (i / 2) + 2 * (lane % 4) + i % 2.
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) sum[i] = s[i / 2 * 4 + i % 2] + s[i / 2 * 4 + 2 + i % 2];
  exchange_half<kScores / 4, 16>(sum);
  exchange_half<kScores / 8, 8>(sum);
  exchange_half<kScores / 16, 4>(sum);
}

// Returns this lane's columns 2 * lane + {0, 1} of the sum over the rows, for 64 columns.
__device__ __forceinline__ float2 sum_rows(float (&s)[32], float scale_log2,
                                           const float (&offset)[2]) {
  float sum[16];
  sum_rows(s, scale_log2, offset, sum);
  return make_float2(sum[0], sum[1]);
}

// Returns the column of 32 whose sum a lane has.
__device__ __forceinline__ int half_column(int lane) {
  return lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
}

// Returns the total of the sums of kWarps warps, which are kTile elements apart.
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
