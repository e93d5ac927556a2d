// Helpers for an online softmax.
#pragma once

#include "common/ptx.cuh"

namespace jax_dsa {

// Returns what to subtract from scores whose running maximum is `max`: 0 instead of -inf, so that a
// masked score becomes exp2(-inf - 0) = 0 and not NaN.
__device__ __forceinline__ float finite_max(float max) { return max == -INFINITY ? 0.f : max; }

// Scores s become probabilities as exp2(s * log2(e) - base * log2(e)), in one instruction. Both
// products are rounded, so this is only as precise as the last bit of base * log2(e). If a base
// exceeds this limit, it is therefore subtracted from the scores first, which is exact for scores
// next to it. The limit is in log2 units. Up to it the error is far below that of bf16.
inline constexpr float kExactBaseLimit = 0x1p12f;

// Returns log(total), or 0 for a row without a key, whose sum of probabilities is 0. A row's
// largest score and this logarithm are what the backward pass needs: their sum is the log-sum-exp,
// but in float32 it does not contain the logarithm if the largest score is huge.
__device__ __forceinline__ float log_of_sum(float total) {
  return total == 0.f ? 0.f : log2f(total) * kLn2;
}

// The factor of outputs that are undefined, such as those of a row without a key. It turns them
// into zeros. A factor of 0 does not: a sink of +inf leaves a NaN.
inline constexpr float kUndefined = -INFINITY;

// Returns a row's largest score, which is NaN if one of its scores is. fmaxf drops NaN, but the sum
// of the row's probabilities, `total`, keeps it.
__device__ __forceinline__ float max_with_nan(float max, float total) {
  return isnan(total) ? total : max;
}

// Sums of probabilities start at -0. The first key tile turns -0 into +0 or a positive number, even
// if all of its keys have a probability of 0. A sum of -0 therefore means that there was no key
// tile and that the accumulator is undefined.
inline constexpr float kNoSum = -0.f;
__device__ __forceinline__ bool is_no_sum(float sum) {
  return __float_as_uint(sum) == __float_as_uint(kNoSum);
}

// Returns the factor of a row's outputs. The denominator is `sum` and what a sink adds to it. If
// all scores are -inf, the output is 0, or NaN if it has an infinite value.
__device__ __forceinline__ float output_factor(float sum, float denominator) {
  if (is_no_sum(sum)) return kUndefined;
  return sum == 0.f ? 1.f : 1.f / denominator;
}

// Returns x * factor, or 0 if the factor is kUndefined.
__device__ __forceinline__ float scale_output(float x, float factor) {
  return factor == kUndefined ? 0.f : x * factor;
}

// Returns what an attention sink adds to the sum of exp(score - max).
__device__ __forceinline__ float sink_weight(float sink, float max) {
  return exp2_approx((sink - max) * kLog2E);
}

}  // namespace jax_dsa
