// Helpers for an online softmax.
#pragma once

#include "common/ptx.cuh"

namespace jax_dsa {

// Returns what to subtract from scores whose running maximum is `max`: 0 instead of -inf, so that a
// masked score becomes exp2(-inf - 0) = 0 and not NaN.
__device__ __forceinline__ float finite_max(float max) { return max == -INFINITY ? 0.f : max; }

// Returns the factor by which an attention sink increases the softmax denominator. `lse` is the
// natural logarithm of the denominator without the sink.
__device__ __forceinline__ float sink_divisor(float sink, float lse) {
  return 1.f + exp2_approx((sink - lse) * kLog2E);
}

}  // namespace jax_dsa
