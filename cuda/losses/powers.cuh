// Running log-sum-exp of the rows of a product, in log2 units.
#pragma once

#include "common/ptx.cuh"

namespace jax_dsa::teacher {

// The largest of some scores, and the sum of 2^(score - largest). If the largest score is -inf, the
// powers are relative to 0.
struct Powers {
  float largest = -INFINITY, sum = 0.f;

  __device__ float base(float x) const { return x == -INFINITY ? 0.f : x; }
  __device__ void rescale(float to) {
    sum *= exp2_approx(largest - base(to));
    largest = to;
  }
  __device__ void combine(int lanes) {
    Powers other = {__shfl_xor_sync(~0u, largest, lanes), __shfl_xor_sync(~0u, sum, lanes)};
    const float both = fmaxf(largest, other.largest);
    rescale(both);
    other.rescale(both);
    sum += other.sum;
  }
  // Returns minus the log-sum-exp. 2^(score + offset) is then a probability. Without finite scores
  // the offset is -inf, so that all probabilities are 0.
  __device__ float offset() const {
    const float lse = base(largest) + log2_approx(sum);
    return lse == -INFINITY ? -INFINITY : -lse;
  }
};

// Adds a thread's scores to its two rows. x[i] is the score of row i / 2 % 2 and key
// first + 8 * (i / 4) + i % 2. Unless the tile is `whole`, scores are masked where sees(row, key)
// is false.
template <typename Sees>
__device__ __forceinline__ void add_scores(float (&x)[32], float scale_log2, int first, bool whole,
                                           Powers (&rows)[2], Sees sees) {
  if (whole) {
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] *= scale_log2;
  } else {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      x[i] = sees(i / 2 % 2, first + i / 4 * 8 + i % 2) ? x[i] * scale_log2 : -INFINITY;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = rows[r].largest;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = fmaxf(largest, x[i / 2 * 4 + 2 * r + i % 2]);
    rows[r].rescale(largest);
    const float base = rows[r].base(largest);
#pragma unroll
    for (int i = 0; i < 16; ++i) rows[r].sum += exp2_approx(x[i / 2 * 4 + 2 * r + i % 2] - base);
  }
}

}  // namespace jax_dsa::teacher
