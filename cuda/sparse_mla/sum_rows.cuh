// Sums the rows that the sparse MLA backward kernel stores instead of reducing them (see bwd.cuh):
//
//     dkv[key] += sum over its entries i, in order, of rows[order[i]]
//
// in f32, bit-identical on every run. Eight columns a thread, so a row is 72 (or 64) threads' 16
// bytes; a block has a few keys. Lists are short (slots over keys, 128 for 1M slots and 8192 keys),
// and every row is read once: bound by memory.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"

namespace jax_dsa::sparse_mla {

inline constexpr int kSumKeys = 4;    // of a block
inline constexpr int kSumUnroll = 4;  // rows on their way at the same time

struct SumRowsParams {
  const void* rows;      // [row_count, dim], bf16
  const int32_t* order;  // [row_count]: rows, those of key 0 first
  const uint32_t* key;   // [row_count]: whose row order[i] is, plus `first_key`, ascending
  float* dkv;            // [keys, dim], added to
  int64_t first_key;     // where keys start
  int64_t keys;          // rows of those from first_key + keys on are no key's
  int row_count;
};

// The first row of `key` or of a later one.
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
