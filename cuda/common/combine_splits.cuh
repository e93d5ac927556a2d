// The weights by which the normalized results of KV splits are combined. A split has the largest
// score max_i of a row and the sum l_i of exp(score - max_i). With max = max_i max_i:
//
//   l    = sum_i exp(max_i - max) l_i
//   out  = sum_i exp(max_i - max) l_i out_i / (l + exp(sink - max))
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

// Returns the weight of a split; 0 if it has no visible key (max = -inf, sum = 0).
__device__ __forceinline__ float split_weight(float split_max, float sum, float max) {
  return exp2_approx((split_max - finite_max(max)) * kLog2E) * sum;
}

// The combination of one row's splits.
struct CombinedRow {
  bool empty;    // no split has a visible key
  float max;     // the largest score; -inf if empty
  float total;   // the sum of exp(score - max), without the sink
  float factor;  // multiplies the weighted sum of the splits' outputs

  // `total` is the sum of all splits' weights.
  __device__ __forceinline__ CombinedRow(float max, float total)
      : empty(total == 0.f), max(max), total(total), factor(empty ? 0.f : 1.f / total) {}

  __device__ __forceinline__ void apply_sink(float sink) {
    factor = 1.f / (total + sink_weight(sink, max));
  }
};

}  // namespace jax_dsa
