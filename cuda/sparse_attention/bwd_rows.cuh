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

}  // namespace jax_dsa::sparse_attention
