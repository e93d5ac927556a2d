// What both backward kernels of sparse attention subtract: from the scores of a row its lse, and
// from dP delta = rowsum(O * dO) - dlse.
#pragma once

#include "common/ptx.cuh"
#include "common/types.h"
#include "masked_attention/scores.cuh"
#include "sparse_attention/sparse_attention.h"

namespace jax_dsa::sparse_attention {

using masked_attention::HugeRow;
using masked_attention::kHugeRow;

// The log-sum-exp of a row from its results. P is exp2(s * log2(e) - log2) with scores s in natural
// units, from which `huge` is subtracted first.
struct RowLse {
  float log2;    // in log2 units; 0 for a huge row, and infinity for a row that sees no key
  HugeRow huge;  // 0 unless the row is huge
  bool is_huge;  // see kHugeRow

  __device__ RowLse(float max_logit, float log_sum) {
    const bool empty = max_logit == -INFINITY;
    is_huge = fabsf(max_logit) * kLog2E > kHugeRow && !empty;
    log2 = empty ? INFINITY : is_huge ? 0.f : (max_logit + log_sum) * kLog2E;
    huge = is_huge ? HugeRow{max_logit, log_sum} : HugeRow{0.f, 0.f};
  }
};

inline constexpr int kDeltaThreads = 256;
inline constexpr int kDeltaLanes = 16;  // lanes that share a row
inline constexpr int kDeltaRounds = 4;  // rows of a lane, all of whose loads are in flight at once
inline constexpr int kDeltaRows = kDeltaThreads / kDeltaLanes * kDeltaRounds;  // of a CTA

// Writes delta [batch, queries, heads]. It is 0 for rows that see no key.
template <DType kType>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ SparseAttentionBwdParams p, float* delta) {
  const int lane = thread_index() % kDeltaLanes;
  const int64_t first = int64_t{blockIdx.x} * kDeltaRows + thread_index() / kDeltaLanes;
  const int64_t rows = p.batch * p.queries * p.heads;
  const auto row = [&](int i) { return first + i * (kDeltaThreads / kDeltaLanes); };
  float max_logit[kDeltaRounds], dlse[kDeltaRounds], sum[kDeltaRounds] = {};
#pragma unroll
  for (int i = 0; i < kDeltaRounds; ++i) {
    max_logit[i] = load_now(p.max_logit + row(i), row(i) < rows, 0.f);
    dlse[i] = load_now(p.dlse + row(i), row(i) < rows, 0.f);
  }
  for (int e = lane * 8; e < p.value_dim; e += kDeltaLanes * 8) {
    uint32_t x[kDeltaRounds][4], y[kDeltaRounds][4];
#pragma unroll
    for (int i = 0; i < kDeltaRounds; ++i) {
      const int64_t at = row(i) * p.value_dim + e;
      load_16_now<0>(static_cast<const uint16_t*>(p.out) + at, row(i) < rows, x[i]);
      load_16_now<0>(static_cast<const uint16_t*>(p.dout) + at, row(i) < rows, y[i]);
    }
#pragma unroll
    for (int i = 0; i < kDeltaRounds; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 a = unpack_16<kType>(x[i][j]), b = unpack_16<kType>(y[i][j]);
        sum[i] += a.x * b.x + a.y * b.y;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kDeltaRounds; ++i) {
#pragma unroll
    for (int d = kDeltaLanes / 2; d > 0; d /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
    if (lane == 0 && row(i) < rows) {
      delta[row(i)] = max_logit[i] == -INFINITY ? 0.f : sum[i] - dlse[i];
    }
  }
}

}  // namespace jax_dsa::sparse_attention
