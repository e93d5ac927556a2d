// Sums the rows that the sparse MLA backward kernel stores instead of reducing them (see bwd.cuh):
//
//     dkv[key] += sum over its entries i, in order, of rows[order[i]]
//
// in f32. Eight columns a thread, so a row is 72 (or 64) threads' 16 bytes; a block has a few keys.
// Lists are short (slots over keys, 128 for 1M slots and 8192 keys), and every row is read once:
// bound by memory.
#pragma once

#include "common/ptx.cuh"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa::sparse_mla {

inline constexpr int kSumKeys = 4;    // of a block
inline constexpr int kSumUnroll = 4;  // rows on their way at the same time

// The first row of `key` or of a later one.
__device__ inline int first_row(const SparseMlaSumRowsParams& p, int64_t key) {
  int low = 0, high = static_cast<int>(p.row_count);
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (p.key[middle] < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <int kD>
__global__ void __launch_bounds__(kSumKeys* kD / 8)
    sum_rows_kernel(const __grid_constant__ SparseMlaSumRowsParams p) {
  constexpr int kLanes = kD / 8;
  const int64_t key = blockIdx.x * int64_t{kSumKeys} + threadIdx.x / kLanes;
  if (key >= p.keys) return;
  const int begin = first_row(p, key), end = first_row(p, key + 1);
  if (begin >= end) return;
  const int column = threadIdx.x % kLanes * 8;
  const char* const rows = static_cast<const char*>(p.rows) + column * 2;
  float sum[8] = {};
  for (int i = begin; i < end; i += kSumUnroll) {
    uint4 x[kSumUnroll];
#pragma unroll
    for (int j = 0; j < kSumUnroll; ++j) {
      x[j] = make_uint4(0, 0, 0, 0);
      if (i + j < end) {
        x[j] = *reinterpret_cast<const uint4*>(rows + int64_t{p.order[i + j]} * kD * 2);
      }
    }
#pragma unroll
    for (int j = 0; j < kSumUnroll; ++j) {
      const uint32_t words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 pair = unpack_bf16(words[k]);
        sum[2 * k] += pair.x;
        sum[2 * k + 1] += pair.y;
      }
    }
  }
  float* const to = p.dkv + key * kD + column;
#pragma unroll
  for (int k = 0; k < 8; ++k) to[k] += sum[k];
}

}  // namespace jax_dsa::sparse_mla
