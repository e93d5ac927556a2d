// How a warp of the sparse MLA backward kernel adds its rows of an accumulator to global memory.
#pragma once

#include "common/ptx.cuh"
#include "sparse_mla/bwd_plan.cuh"

namespace jax_dsa::sparse_mla {

// Where the gradients of a warp's 16 slots belong: of this lane's columns, to[i] those of row
// 4 * i + lane / 8, if bit i of `counts` is set.
struct KeyRows {
  float* to[4];
  uint32_t counts;

  // `index` is that of slot lane % 16.
  __device__ KeyRows(float* dkv, int64_t stride, const Slots& slots, int index) : counts(0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = __shfl_sync(~0u, index, i * 4 + lane / 8);
      const bool exists = slots.counts(key);
      counts |= uint32_t{exists} << i;
      to[i] = dkv + lane % 8 * 4 + (exists ? key : 0) * stride;
    }
  }
  __device__ void move(int columns) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] += columns;
  }
};

// Adds the warp's 16 rows of an accumulator to global memory, 8 rows by 32 columns at a time
// through `stage`, so that eight lanes have 128 bytes of a row side by side: reductions of 32 bytes
// run at 60 % of the rate. In the stage, 1 KiB and so aligned, chunk c of row r is at chunk
// c ^ 2 (r % 4): the quads of four rows store to different banks. A piece is reduced when the next
// one has been loaded from there, so that nothing waits for shared memory, nor for a reduction to
// take its registers; a warp's accesses to shared memory happen in order. kAll: every row counts.
template <bool kAll, int kN>
__device__ __forceinline__ void reduce_rows(const float (&x)[kN], uint32_t stage,
                                            const KeyRows& rows) {
  constexpr int kPieces = kN / 8;
  const int lane = threadIdx.x % 32, row = lane / 4, eighth = lane / 8;
  const uint32_t write = stage + row * 128 + (lane % 4 / 2 ^ row % 4 * 2) * 16 + lane % 2 * 8;
  const uint32_t read = stage + eighth * 128 + (lane % 8 ^ eighth * 2) * 16;
  float sum[2][2][4];
  const auto put = [&](int piece) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = piece / 2 * 16 + j * 4 + piece % 2 * 2;
      store_shared_8(write ^ (j * 32), x[at], x[at + 1]);
    }
    __syncwarp();
  };
  const auto add = [&](int piece) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = piece % 2 * 2 + k;
      const float (&y)[4] = sum[piece % 2][k];
      if (kAll || rows.counts >> i & 1) {
        red_add(rows.to[i] + piece / 2 * 32, y[0], y[1], y[2], y[3]);
      }
    }
  };
  put(0);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    load_shared_16(read, sum[piece % 2][0]);
    load_shared_16(read + 512, sum[piece % 2][1]);
    __syncwarp();
    if (piece + 1 < kPieces) put(piece + 1);
    if (piece > 0) add(piece - 1);
  }
  add(kPieces - 1);
}

}  // namespace jax_dsa::sparse_mla
