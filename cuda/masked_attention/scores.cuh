// What both passes of masked attention do to scores as accumulators have them.
#pragma once

#include "common/ptx.cuh"
#include "common/wgmma.cuh"

namespace jax_dsa::masked_attention {

// y of scores x, in natural units.
__device__ __forceinline__ float softcapped(float x, float softcap, float inverse) {
  // tanh(z) = 1 - 2 / (1 + exp(2 z)), without its cancellation near 0.
  const float z = x * inverse, e = exp2_approx(-2.f * kLog2E * fabsf(z));
  const float far = (1.f - e) * reciprocal_approx(1.f + e);
  const float z2 = z * z;
  const float near = fabsf(z) * (1.f + z2 * (-1.f / 3.f + z2 * (2.f / 15.f - z2 * (17.f / 315.f))));
  const float t = fabsf(z) < 0.1f ? near : far;
  return softcap * copysignf(t, z);
}

// -inf for scores whose bit is not set; `row` has the bits of the thread's row, those of the row
// eight further on follow after eight rows.
template <int kScores>
__device__ __forceinline__ void hide(float (&s)[kScores], const uint32_t (*row)[kScores / 16]) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int w = 0; w < kScores / 16; ++w) {
    const uint32_t bits[2] = {row[0][w] >> column, row[8][w] >> column};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (!(bits[i / 2 % 2] >> (i / 4 * 8 + i % 2) & 1)) s[w * 16 + i] = -INFINITY;
    }
  }
}

// Sums over keys or values start at what is to be subtracted from them, which has a value for each
// query, a column.
template <int kScores>
__device__ __forceinline__ void start_at(float (&x)[kScores], const float (&queries)[kScores * 2]) {
  const auto* const from = reinterpret_cast<const float2*>(&queries[(thread_index() & 3) * 2]);
#pragma unroll
  for (int i = 0; i < kScores; i += 4) {
    const float2 y = from[i];
    x[i] = x[i + 2] = -y.x, x[i + 1] = x[i + 3] = -y.y;
  }
  wgmma_pin(x);
}

// y of all scores, for general ones.
template <int kScores>
__device__ __forceinline__ void cap_scores(float (&s)[kScores], float scale, float softcap,
                                           float inverse) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    s[i] *= scale;
    if (softcap > 0.f) s[i] = softcapped(s[i], softcap, inverse);
  }
}

// What exp2 takes for the probability of a general score; see lse_factor. A bias may hide all keys
// of a query by -1e9 or more: lse is then as far from 0, and no product may be rounded before both
// are subtracted.
template <bool kBias>
__device__ __forceinline__ float exponent(float s, float lse) {
  return kBias ? (s - lse) * kLog2E : fmaf(s, kLog2E, -lse);
}

// Multiplies dout . v - delta of two neighbouring scores by what a softcap makes of gradients, 1 -
// (y / softcap)^2, as their probabilities x and their queries' logarithms tell y.
template <bool kBias>
__device__ __forceinline__ void cap_gradients(float& first, float& second, float2 x, float2 lse,
                                              float inverse) {
  const auto y = [](float x, float lse) {
    return kBias ? fmaf(log2f(x), kLn2, lse) : (log2f(x) + lse) * kLn2;
  };
  const float t = y(x.x, lse.x) * inverse, u = y(x.y, lse.y) * inverse;
  first *= x.x > 0.f ? 1.f - t * t : 0.f, second *= x.y > 0.f ? 1.f - u * u : 0.f;
}

// dS of two neighbouring scores from their probabilities x and from dout . v - delta. Where scores
// are hidden, dp may be anything.
__device__ __forceinline__ float2 score_gradients(float2 x, float2 dp, bool partial) {
  float2 ds = {x.x * dp.x, x.y * dp.y};
  if (partial) ds.x = x.x == 0.f ? 0.f : ds.x, ds.y = x.y == 0.f ? 0.f : ds.y;
  return ds;
}

}  // namespace jax_dsa::masked_attention
