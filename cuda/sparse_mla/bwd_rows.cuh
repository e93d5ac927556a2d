// Adds a warp's rows of an accumulator of the sparse MLA backward kernel to global memory.
#pragma once

#include "common/ptx.cuh"
#include "sparse_mla/bwd_plan.cuh"

namespace jax_dsa::sparse_mla {

// The targets of the gradients of a warp's 16 slots. to[i] points to this lane's columns in row i /
// 2 * 8 + lane / 8 * 2 + i % 2, which is valid if bit i of `valid` is set.
struct KeyRows {
  float* to[4];
  uint32_t valid;

  // `index` is the index of slot lane % 16, with `bits` mask bits below it.
  __device__ KeyRows(float* dkv, int64_t stride, const Slots& slots, int index, int bits)
      : valid(0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = __shfl_sync(~0u, index, i / 2 * 8 + lane / 8 * 2 + i % 2);
      const bool exists = slots.is_valid(key);
      valid |= uint32_t{exists} << i;
      to[i] = dkv + lane % 8 * 4 + (exists ? key >> bits : 0) * stride;
    }
  }
  __device__ void move(int columns) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] += columns;
  }
};

// Adds the warp's 16 rows of an accumulator to global memory. Eight neighbouring lanes reduce 128
// bytes of a row, because reductions of 32 or 64 bytes reach only 60 or 80 % of the rate. Of 32
// columns, each lane of a row's quad holds four pairs: two of the first 16 columns and two of the
// others. Quads of neighbouring rows exchange halves, so that the first one has the first 16
// columns of both rows and the second one the other 16. Pairs stay together, which gives the column
// order of `sparse_mla_dkv_place`. kAll: every row is valid.
template <bool kAll, int kN>
__device__ __forceinline__ void reduce_rows(const float (&x)[kN], const KeyRows& rows) {
  const bool first = threadIdx.x % 8 < 4;
#pragma unroll
  for (int columns = 0; columns < kN * 2; columns += 32) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows 0..7 of the warp, then rows 8..15
      float sums[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = columns / 2 + i / 2 * 4 + half * 2 + i % 2;
        const float other = __shfl_xor_sync(~0u, first ? x[at + 8] : x[at], 4);
        sums[0][i] = first ? x[at] : other;
        sums[1][i] = first ? other : x[at + 8];
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float (&y)[4] = sums[r];
        if (kAll || rows.valid >> (half * 2 + r) & 1) {
          red_add(rows.to[half * 2 + r] + columns, y[0], y[1], y[2], y[3]);
        }
      }
    }
  }
}

}  // namespace jax_dsa::sparse_mla
