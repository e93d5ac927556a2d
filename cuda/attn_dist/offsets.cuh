// What the attn_dist kernels subtract from the scores of a head, so that their exponentials are
// gated probabilities.
#pragma once

#include "attn_dist/fwd_plan.cuh"
#include "common/ptx.cuh"
#include "common/softmax.cuh"

namespace jax_dsa::attn_dist {

// Returns lse of a head without `log_sum`, or 0 if there is no head or key.
__device__ __forceinline__ float score_base(const AttnDistFwdParams& p, const WorkTile& work_tile,
                                            int head) {
  return head < 0 ? 0.f : finite_max(__ldg(p.lse + work_tile.token * p.heads + head));
}

// Returns what to add to the scores of a head, in log2 units, so that their exponentials are gated
// probabilities. It is -inf if these are 0 whatever the scores are. If `exact`, `score_base` is
// subtracted from the scores before.
__device__ __forceinline__ float score_offset(const AttnDistFwdParams& p, const WorkTile& work_tile,
                                              int head, bool exact) {
  if (head < 0) return -INFINITY;
  const int64_t at = work_tile.token * p.heads + head;
  const float lse = __ldg(p.lse + at);
  if (lse == -INFINITY) return lse;
  const float log_sum = p.log_sum ? __ldg(p.log_sum + at) : 0.f;
  const float offset = ((exact ? 0.f : lse) + log_sum) * kLog2E;
  if (p.sinks == nullptr) return -offset;
  const float sink = __ldg(p.sinks + int64_t{work_tile.batch} * p.sinks_stride + head);
  const float x = (sink - lse - log_sum) * kLog2E;
  // The result is finite even for an infinite sink, so that a NaN score still gives NaN.
  return -(offset + (x > 30.f ? fminf(x, 0x1p127f) : log2f(1.f + exp2_approx(x))));
}

}  // namespace jax_dsa::attn_dist
