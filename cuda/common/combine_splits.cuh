// The weights by which the normalized results of KV splits are combined:
//
//   lse  = log sum_i exp(lse_i)
//   out  = gate * sum_i exp(lse_i - lse) out_i      gate = 1 / (1 + exp(sink - lse))
//
// With max = max_i lse_i, a split's weight is exp(lse_i - max), and the weighted sum of outputs is
// multiplied once by gate / sum_i exp(lse_i - max).
#pragma once

#include "common/softmax.cuh"

namespace jax_dsa {

// Returns the maximum of `x` over each group of kLanes neighboring lanes, in all of its lanes.
template <int kLanes = 32>
__device__ __forceinline__ float max_over_lanes(float x) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  return x;
}

// Returns the sum of `x` over each group of kLanes neighboring lanes, in all of its lanes.
template <int kLanes = 32>
__device__ __forceinline__ float sum_over_lanes(float x) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// Returns the weight of a split; 0 if it has no visible key (lse = -inf).
__device__ __forceinline__ float split_weight(float lse, float max_lse) {
  return exp2_approx((lse - finite_max(max_lse)) * kLog2E);
}

// The combination of one row's splits.
struct CombinedRow {
  bool empty;    // no split has a visible key
  float lse;     // natural logarithm, without the sink; -inf if empty
  float factor;  // multiplies the weighted sum of the splits' outputs

  // `total` is the sum of all splits' weights.
  __device__ __forceinline__ CombinedRow(float max_lse, float total)
      : empty(total == 0.f),
        lse(empty ? -INFINITY : max_lse + log2f(total) * kLn2),
        factor(empty ? 0.f : 1.f / total) {}

  __device__ __forceinline__ void apply_sink(float sink) { factor /= sink_divisor(sink, lse); }
};

}  // namespace jax_dsa
