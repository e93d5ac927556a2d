// Running sums of the exponentials of the rows of a product.
#pragma once

#include "common/ptx.cuh"
#include "common/softmax.cuh"

namespace jax_dsa::teacher {

// The largest of some scores, and the sum of exp(score - largest). If the largest score is -inf,
// the exponentials are relative to 0.
struct Powers {
  float largest = -INFINITY, sum = 0.f;

  __device__ void rescale(float to) {
    sum *= exp2_approx((largest - finite_max(to)) * kLog2E);
    largest = to;
  }
  __device__ void combine(Powers other) {
    const float both = fmaxf(largest, other.largest);
    rescale(both);
    other.rescale(both);
    sum += other.sum;
  }
  // Combines those of lanes whose numbers differ in the bit `lanes`.
  __device__ void combine(int lanes) {
    combine({__shfl_xor_sync(~0u, largest, lanes), __shfl_xor_sync(~0u, sum, lanes)});
  }
  // Returns the largest score, and minus the logarithm of the sum in log2 units. The probabilities
  // are exp2((score - largest) * log2(e) + logarithm). Without finite scores the logarithm is -inf,
  // so that all probabilities are 0.
  __device__ float2 pair() const {
    return make_float2(finite_max(largest), sum == 0.f ? -INFINITY : -log2_approx(sum));
  }
};

// Adds a thread's scores to its two rows. x[i] times `scale` is the score of row i / 2 % 2 and key
// first + 8 * (i / 4) + i % 2. Unless the tile is `whole`, scores are masked where sees(row, key)
// is false.
template <int kScores, typename Sees>
__device__ __forceinline__ void add_scores(float (&x)[kScores], float scale, int first, bool whole,
                                           Powers (&rows)[2], Sees sees) {
  if (whole) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) x[i] = __fmul_rn(x[i], scale);
  } else {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const bool seen = sees(i / 2 % 2, first + i / 4 * 8 + i % 2);
      x[i] = seen ? __fmul_rn(x[i], scale) : -INFINITY;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = rows[r].largest;
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) largest = fmaxf(largest, x[i / 2 * 4 + 2 * r + i % 2]);
    rows[r].rescale(largest);
    float base = finite_max(largest) * kLog2E;
    if (fabsf(base) > kExactBaseLimit) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) x[i / 2 * 4 + 2 * r + i % 2] -= largest;
      base = 0.f;
    }
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      rows[r].sum += exp2_approx(fmaf(x[i / 2 * 4 + 2 * r + i % 2], kLog2E, -base));
    }
  }
}

// Subtracts the largest scores of a thread's two rows from its scores, where they exceed
// kExactBaseLimit. Afterwards the factor of the scores is log2(e).
template <int kScores>
__device__ __forceinline__ void subtract_largest(float (&x)[kScores], float scale, float2 largest) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    x[i] = __fmul_rn(x[i], scale) - (i / 2 % 2 ? largest.y : largest.x);
  }
}

}  // namespace jax_dsa::teacher
