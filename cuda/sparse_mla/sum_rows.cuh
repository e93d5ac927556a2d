// Sums the rows that the sparse MLA backward kernels store if they do not reduce them (see
// bwd.cuh):
//
//   dkv[key] += sum over its entries i, in order, of rows[order[i]]
//
// The sum is in float32 and bit-identical on every run.
//
// Tiling. A CTA processes kSumKeys keys. Each thread sums 8 columns (16 bytes) of one key, so a key
// takes 72 (or 64) threads. A key has few rows (slots over keys: 128 for 1M slots and 8192 keys),
// and every row is read once, so the kernel is bound by memory.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "common/types.h"

namespace jax_dsa::sparse_mla {

inline constexpr int kSumKeys = 4;    // keys per CTA
inline constexpr int kSumUnroll = 4;  // rows that a thread loads at a time

struct SumRowsParams {
  const void* rows;      // [row_count, dim], bf16
  const int32_t* order;  // [row_count], positions in `rows`, in the order of their keys
  const uint32_t* key;   // [row_count], ascending: first_key + the key of row order[i]
  float* dkv;            // [keys, dim], accumulated
  int64_t first_key;     // what `key` holds for key 0
  int64_t keys;          // rows whose `key` is at least first_key + keys are skipped
  int row_count;
};

// Returns the first position in `order` whose row belongs to `key` or a later key.
__device__ inline int first_row(const SumRowsParams& p, int64_t key) {
  int low = 0, high = p.row_count;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (p.key[middle] < p.first_key + key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <int kD>
__global__ void __launch_bounds__(kSumKeys* kD / 8)
    sum_rows_kernel(const __grid_constant__ SumRowsParams p) {
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
