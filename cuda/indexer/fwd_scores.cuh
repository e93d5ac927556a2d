// The product of a key tile with the queries, and the sums over heads.
#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/wgmma.cuh"
#include "indexer/indexer.h"

namespace jax_dsa::indexer {

// Starts the product. Its last kEarlySteps steps form a wgmma group of their own.
template <typename Tr>
__device__ __forceinline__ void multiply(float (&d)[Tr::kN / 2], uint64_t k, uint64_t q) {
  constexpr int kSteps = Tr::kChannelBytes / 32;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i == kSteps - Tr::kEarlySteps) wgmma_commit();
    const int block = i * 32 / Tr::kRowBytes, step = i * 32 % Tr::kRowBytes;
    const uint64_t a = moved(k, block * kTile * Tr::kRowBytes + step);
    const uint64_t b = moved(q, block * Tr::kColumns * Tr::kRowBytes + step);
    if constexpr (Tr::kDType == IndexerDType::kBF16) {
      wgmma_bf16<kKMajor, kKMajor>(d, a, b, i > 0);
    } else {
      wgmma_e4m3(d, a, b, i > 0);
    }
  }
  wgmma_commit();
}

// Computes the sums of w * relu(x) over heads from the accumulators. A thread holds rows r and r +
// 8 and columns 2 * (lane % 4) + {0, 1} of each eight. The lane with lane % 4 = 2 * b + a gets
// sum[h] for row r + 8 * a of query 2 * h + b. If there is one query, both values of b get it.
template <typename Tr, bool kRelu>
__device__ __forceinline__ void sum_heads(const float (&x)[Tr::kN / 2],
                                          const float (&w)[Tr::kN / 4], int lane,
                                          float (&sum)[ceil_div(Tr::kOwnQueries, 2)]) {
  constexpr int kGroups = Tr::kHeads / 8;  // groups of eight columns per query
  float partial[Tr::kOwnQueries][2];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int query = 0; query < Tr::kOwnQueries; ++query) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = query * kGroups + g;
          const float score = x[4 * i + 2 * r + e];
          const float y = Tr::kReluBySum ? score + (kRelu ? fabsf(score) : score)
                          : kRelu        ? max_nan(score, 0.f)
                                         : score;
          float& s = partial[query][r];
          s = g + e == 0 ? w[2 * i] * y : fmaf(w[2 * i + e], y, s);
        }
      }
    }
  }
  const bool a = lane & 1, b = lane & 2;
  float row[Tr::kOwnQueries];
#pragma unroll
  for (int query = 0; query < Tr::kOwnQueries; ++query) {
    const float other = __shfl_xor_sync(~0u, a ? partial[query][0] : partial[query][1], 1);
    row[query] = (a ? partial[query][1] : partial[query][0]) + other;
  }
#pragma unroll
  for (int h = 0; h < ceil_div(Tr::kOwnQueries, 2); ++h) {
    constexpr int kLast = Tr::kOwnQueries - 1;
    const int next = min(2 * h + 1, kLast);
    const float other = __shfl_xor_sync(~0u, b ? row[2 * h] : row[next], 2);
    sum[h] = (b ? row[next] : row[2 * h]) + other;
  }
}

}  // namespace jax_dsa::indexer
