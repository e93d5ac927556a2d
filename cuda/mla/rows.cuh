// What one thread of the sparse MLA forward kernel does to its rows of scores and outputs. See
// fwd.cuh.
#pragma once

#include <cuda_bf16.h>

#include "common/ptx.cuh"
#include "common/softmax.cuh"
#include "mla/plan.cuh"

namespace jax_dsa::mla {

// State of two rows of one warpgroup's accumulator: a thread has rows r and r + 8.
struct Rows {
  float reference[2];  // log2 units; -inf before the first valid score
  float sum[2];        // of this thread's probabilities, relative to the reference
  float others[2];     // the same of its counterpart in the other warpgroup, known near the end

  // Moves to new references; returns by how much to scale what is relative to the old ones.
  __device__ void move(const float (&to)[2], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = exp2_approx(reference[r] - finite_max(to[r]));
      sum[r] *= factor[r];
      others[r] *= factor[r];
      reference[r] = to[r];
    }
  }
  // Row r's sum over all keys, near the end; 0 if none counted.
  __device__ float total(int r) const {
    float x = sum[r] + others[r];
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
  // Its natural logarithm, of what the reference stands for too.
  __device__ float lse(int r, float total) const {
    return total == 0.f ? -INFINITY : (reference[r] + log2f(total)) * kLn2;
  }
};

__device__ __forceinline__ void scale_rows(float (&o)[128], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
}

// -inf in the columns of a tile's scores that do not count.
__device__ __forceinline__ void hide_columns(float (&s)[32], uint64_t valid) {
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

// Turns a tile's scores into probabilities, as operands of the next product. Advances `rows`; where
// this moved a reference of the warp's rows, returns true and gives the factor that the accumulator
// needs. Calls `between` halfway.
template <typename F>
__device__ __forceinline__ bool softmax(float (&s)[32], float scale_log2, float margin, Rows& rows,
                                        uint32_t (&probabilities)[4][4], float (&factor)[2],
                                        F between) {
  float top[4];  // by i % 4, for instructions that need not wait for each other
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i] = s[i];
#pragma unroll
  for (int i = 4; i < 32; ++i) top[i % 4] = fmaxf(top[i % 4], s[i]);
  float to[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = fmaxf(top[2 * r], top[2 * r + 1]);
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    m *= scale_log2;
    to[r] = m > rows.reference[r] + margin ? m : rows.reference[r];
  }
  const bool moved = __any_sync(~0u, to[0] != rows.reference[0] || to[1] != rows.reference[1]);
  if (moved) rows.move(to, factor);
  between();
  const float base[2] = {finite_max(to[0]), finite_max(to[1])};
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int r = i / 2 % 2;
    const float a = exp2_approx(fmaf(s[i], scale_log2, -base[r]));
    const float b = exp2_approx(fmaf(s[i + 1], scale_log2, -base[r]));
    sum[i % 4] += a;
    sum[i % 4 + 1] += b;
    probabilities[i / 8][i / 2 % 4] = pack_bf16(a, b);
  }
  rows.sum[0] += sum[0] + sum[1];
  rows.sum[1] += sum[2] + sum[3];
  return moved;
}

// Stores the warp's 16 rows of the accumulator as bf16, 32 columns at a time through `stage`, which
// has rows of 64 bytes whose 16-byte chunks are swizzled. `out` is the row lane / 4 of rows kStride
// long. A factor of 0 makes zeros of anything. common/store_rows.cuh does this for any stride; with
// it ptxas 13.0 serialises products of the backward pass.
template <int kStride, int kN>
__device__ __forceinline__ void store_rows(const float (&o)[kN], const float (&factor)[2],
                                           uint32_t stage, __nv_bfloat16* out, int rows_left) {
  const int lane = threadIdx.x % 32;
  const uint32_t to = stage + lane % 16 * 64;
  const uint32_t mask[2] = {factor[0] == 0.f ? 0u : ~0u, factor[1] == 0.f ? 0u : ~0u};
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
      load_shared_16(stage + (r * 8 + lane / 4) * 64 + chunk * 16, x[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_16(out + r * 8 * kStride + i * 32 + lane % 4 * 8, x[r], r * 8 < rows_left);
    }
    __syncwarp();
  }
}

}  // namespace jax_dsa::mla
