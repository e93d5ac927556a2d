// What one thread of the kernels for 64 heads does to its rows of scores and outputs. See
// consumer.cuh.
#pragma once

#include <cuda_bf16.h>

#include "common/ptx.cuh"
#include "common/softmax.cuh"
#include "mla/plan.cuh"

namespace jax_dsa::mla {

// Softmax state of two rows of a warpgroup's accumulator: a thread holds rows r and r + 8. Both
// sums start at kNoSum.
struct Rows {
  float running_max[2];  // -inf before the first valid score
  float sum[2];          // of this thread's probabilities, relative to the running maximum
  float peer_sum[2];     // the sum of the same thread of the peer warpgroup, known near the end

  // Adopts new running maxima. Returns the factors for everything that is relative to the old ones.
  __device__ void raise(const float (&next)[2], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = exp2_approx((running_max[r] - finite_max(next[r])) * kLog2E);
      sum[r] *= factor[r];
      peer_sum[r] *= factor[r];
      running_max[r] = next[r];
    }
  }
  // Returns row r's sum over all keys, or kNoSum if there was no key tile. `peer_sum` must be
  // known.
  __device__ float total(int r) const {
    float x = sum[r] + peer_sum[r];
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
};

__device__ __forceinline__ void scale_rows(float (&o)[128], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
}

// Sets the scores of invalid keys (columns) to -inf.
__device__ __forceinline__ void mask_columns(float (&s)[32], uint64_t valid) {
  if (valid != ~uint64_t{0}) {
    const int column = threadIdx.x % 4 * 2;
    const uint32_t low = static_cast<uint32_t>(valid) >> column;
    const uint32_t high = static_cast<uint32_t>(valid >> 32) >> column;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const uint32_t bits = i < 16 ? low : high;
      if (!(bits >> (i / 4 % 4 * 8 + i % 2) & 1)) s[i] = -INFINITY;
    }
  }
}

// Turns a tile's scores into probabilities, packed as operands of the next product, and updates
// `rows`. Returns whether a running maximum of the warp's rows was raised; `factor` is then what
// the accumulator must be scaled by. Calls `between` halfway.
template <typename F>
__device__ __forceinline__ bool softmax(float (&s)[32], float scale, float margin, Rows& rows,
                                        uint32_t (&probabilities)[4][4], float (&factor)[2],
                                        F between) {
  float top[4];  // by i % 4, to have independent dependency chains
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i] = s[i];
#pragma unroll
  for (int i = 4; i < 32; ++i) top[i % 4] = fmaxf(top[i % 4], s[i]);
  float next[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = fmaxf(top[2 * r], top[2 * r + 1]);
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    m = __fmul_rn(m, scale);
    next[r] = m > rows.running_max[r] + margin ? m : rows.running_max[r];
  }
  const bool raised =
      __any_sync(~0u, next[0] != rows.running_max[0] || next[1] != rows.running_max[1]);
  if (raised) rows.raise(next, factor);
  between();
  float factor_log2 = scale * kLog2E;
  float base[2] = {finite_max(next[0]) * kLog2E, finite_max(next[1]) * kLog2E};
  if (__any_sync(~0u, fmaxf(fabsf(base[0]), fabsf(base[1])) > kExactBaseLimit)) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = __fmul_rn(s[i], scale) - finite_max(next[i / 2 % 2]);
    factor_log2 = kLog2E;
    base[0] = base[1] = 0.f;
  }
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int r = i / 2 % 2;
    const float a = exp2_approx(fmaf(s[i], factor_log2, -base[r]));
    const float b = exp2_approx(fmaf(s[i + 1], factor_log2, -base[r]));
    sum[i % 4] += a;
    sum[i % 4 + 1] += b;
    probabilities[i / 8][i / 2 % 4] = pack_bf16(a, b);
  }
  rows.sum[0] += sum[0] + sum[1];
  rows.sum[1] += sum[2] + sum[3];
  return raised;
}

// Stores the warp's 16 rows of the accumulator as bf16, 32 columns at a time through `staging`,
// which has rows of 64 bytes with swizzled 16-byte chunks. `out` is row lane / 4; rows are kStride
// elements apart. Rows whose factor is kUndefined become zeros. common/store_rows.cuh does the same
// for any stride, but with it ptxas 13.0 serializes products of the backward pass.
template <int kStride, int kN>
__device__ __forceinline__ void store_rows(const float (&o)[kN], const float (&factor)[2],
                                           uint32_t staging, __nv_bfloat16* out, int rows_left) {
  const int lane = threadIdx.x % 32;
  const uint32_t to = staging + lane % 16 * 64;
  const uint32_t mask[2] = {factor[0] == kUndefined ? 0u : ~0u, factor[1] == kUndefined ? 0u : ~0u};
#pragma unroll
  for (int i = 0; i < kN / 16; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = i * 16 + k * 8 + j * 2;
        x[j] = pack_bf16(o[at] * factor[j % 2], o[at + 1] * factor[j % 2]) & mask[j % 2];
      }
      const int chunk = (2 * k + lane / 16) ^ (lane % 8 / 2);
      store_matrix_x4(to + chunk * 16, x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
    uint32_t x[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int chunk = lane % 4 ^ (lane / 8);
      load_shared_16(staging + (r * 8 + lane / 4) * 64 + chunk * 16, x[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_16(out + r * 8 * kStride + i * 32 + lane % 4 * 8, x[r], r * 8 < rows_left);
    }
    __syncwarp();
  }
}

}  // namespace jax_dsa::mla
