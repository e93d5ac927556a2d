// Operations on accumulator fragments of scores that both passes of masked attention use.
#pragma once

#include "common/ptx.cuh"
#include "common/wgmma.cuh"

namespace jax_dsa::masked_attention {

// Returns softcap * tanh(x / softcap) of a score x in natural units. `inverse` is 1 / softcap.
__device__ __forceinline__ float softcapped(float x, float softcap, float inverse) {
  // tanh(z) = (1 - e) / (1 + e) with e = exp(-2 |z|). Near 0 that form cancels, so a polynomial
  // replaces it.
  const float z = x * inverse, e = exp2_approx(-2.f * kLog2E * fabsf(z));
  const float far = (1.f - e) * reciprocal_approx(1.f + e);
  const float z2 = z * z;
  const float near = fabsf(z) * (1.f + z2 * (-1.f / 3.f + z2 * (2.f / 15.f - z2 * (17.f / 315.f))));
  const float t = fabsf(z) < 0.1f ? near : far;
  return softcap * copysignf(t, z);
}

// Sets the scores whose bit is not set to -inf. row[0] holds the bits of the thread's first row,
// row[8] those of its second row, which is eight rows below.
template <int kScores>
__device__ __forceinline__ void mask_scores(float (&s)[kScores],
                                            const uint32_t (*row)[kScores / 16]) {
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

// Initializes an accumulator with the negated value of each query, where queries are the columns.
// The MMA that follows thus subtracts these values for free.
template <int kScores>
__device__ __forceinline__ void init_negated(float (&x)[kScores],
                                             const float (&queries)[kScores * 2]) {
  const auto* const from = reinterpret_cast<const float2*>(&queries[(thread_index() & 3) * 2]);
#pragma unroll
  for (int i = 0; i < kScores; i += 4) {
    const float2 y = from[i];
    x[i] = x[i + 2] = -y.x, x[i + 1] = x[i + 3] = -y.y;
  }
  wgmma_pin(x);
}

// Scales scores and applies the softcap, if there is one.
template <int kScores>
__device__ __forceinline__ void cap_scores(float (&s)[kScores], float scale, float softcap,
                                           float inverse) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    s[i] *= scale;
    if (softcap > 0.f) s[i] = softcapped(s[i], softcap, inverse);
  }
}

// Returns the argument of exp2 for the probability of a general score. See lse_factor for the units
// of `lse`. A bias may mask all keys of a query with -1e9 or less. lse is then just as far from 0,
// so no product may be rounded before the two are subtracted.
template <bool kBias>
__device__ __forceinline__ float exponent(float s, float lse) {
  return kBias ? (s - lse) * kLog2E : fmaf(s, kLog2E, -lse);
}

// Multiplies dP - delta of two neighbouring scores by the derivative of the softcap, 1 - (y /
// softcap)^2. The capped score y is recomputed from the probability x and the lse of its query.
template <bool kBias>
__device__ __forceinline__ void cap_gradients(float& first, float& second, float2 x, float2 lse,
                                              float inverse) {
  const auto y = [](float x, float lse) {
    return kBias ? fmaf(log2f(x), kLn2, lse) : (log2f(x) + lse) * kLn2;
  };
  const float t = y(x.x, lse.x) * inverse, u = y(x.y, lse.y) * inverse;
  first *= x.x > 0.f ? 1.f - t * t : 0.f, second *= x.y > 0.f ? 1.f - u * u : 0.f;
}

// Returns dS of two neighbouring scores from their probabilities x and from dP - delta. dP is
// undefined where the mask hides a score, so multiply only where the probability is not 0.
__device__ __forceinline__ float2 score_gradients(float2 x, float2 dp, bool partial) {
  float2 ds = {x.x * dp.x, x.y * dp.y};
  if (partial) ds.x = x.x == 0.f ? 0.f : ds.x, ds.y = x.y == 0.f ? 0.f : ds.y;
  return ds;
}

}  // namespace jax_dsa::masked_attention
