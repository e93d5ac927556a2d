// Writes wgmma accumulators to rows in global memory.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "common/softmax.cuh"
#include "common/types.h"

namespace jax_dsa {

// Stores a warp's 16 rows of an accumulator, multiplied by `factor`. Rows whose factor is
// kUndefined become zeros. The warp stages 32 columns at a time in 1 KiB of shared memory at
// `stage`: rows of 64 bytes with swizzled 16-byte chunks. `out` points to row lane / 4, and rows
// are `stride` elements apart. `rows_left` counts rows from there. Only the first `columns`
// columns, a multiple of 8, exist in global memory.
template <DType kType, int kN>
__device__ __forceinline__ void store_rows(const float (&o)[kN], const float (&factor)[2],
                                           uint32_t stage, void* out, int64_t stride, int rows_left,
                                           int columns) {
  const int lane = threadIdx.x % 32;
  const uint32_t to = stage + lane % 16 * 64;
  const uint32_t mask[2] = {factor[0] == kUndefined ? 0u : ~0u, factor[1] == kUndefined ? 0u : ~0u};
#pragma unroll
  for (int i = 0; i < kN / 16; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = i * 16 + k * 8 + j * 2;
        x[j] = pack_16<kType>(o[at] * factor[j % 2], o[at + 1] * factor[j % 2]) & mask[j % 2];
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
      store_16(static_cast<uint16_t*>(out) + r * 8 * stride + i * 32 + lane % 4 * 8, x[r],
               r * 8 < rows_left && i * 32 + lane % 4 * 8 < columns);
    }
    __syncwarp();
  }
}

}  // namespace jax_dsa
