// The online softmax of the attention forward kernels, on accumulator fragments of 16 rows per
// warp.
#pragma once

#include "common/softmax.cuh"
#include "masked_attention/scores.cuh"

namespace jax_dsa::masked_attention {

// A score may exceed the running maximum of its row by this much before the maximum moves; in log2
// units.
inline constexpr float kRescaleThreshold = 8.f;

// Softmax state of the two accumulator rows of a thread, r and r + 8.
struct RowState {
  // In units of the scores; -inf before the first visible score.
  float running_max[2];
  float max_score;  // the exact maximum of row r in lanes with lane % 2 == r
  float sum[2];     // sum of this thread's probabilities, relative to the running maximum
  bool huge;        // whether any row of the warp is huge; see kHugeRow

  // Returns the sum of row r over all keys.
  __device__ float total(int r) const {
    const float x = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
};

// The units of the scores that `softmax` gets: x * scale in natural units, where scale is 1 if
// kNatural.
template <bool kNatural>
struct ScoreUnits {
  float scale;
  float scale_log2;  // scale * log2(e)

  __device__ explicit ScoreUnits(float factor)
      : scale(kNatural ? 1.f : factor), scale_log2(kNatural ? kLog2E : factor * kLog2E) {}
  // Returns x in natural units, rounded as the backward pass rounds it.
  __device__ float natural(float x) const { return kNatural ? x : __fmul_rn(x, scale); }
};

// Replaces scores by probabilities. Returns whether a running maximum of the warp's rows moved;
// `factor` is then what to multiply the accumulators by.
template <bool kNatural, int kScores>
__device__ __forceinline__ bool softmax(float (&s)[kScores], const ScoreUnits<kNatural>& units,
                                        RowState& rows, float (&factor)[2]) {
  float top[4];  // four independent chains, for instruction-level parallelism
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i] = s[i];
#pragma unroll
  for (int i = 4; i < kScores; ++i) top[i % 4] = fmaxf(top[i % 4], s[i]);
  float new_max[2], largest[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = fmaxf(top[2 * r], top[2 * r + 1]);
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    largest[r] = m;
    const bool moves = (m - rows.running_max[r]) * units.scale_log2 > kRescaleThreshold;
    new_max[r] = moves ? m : rows.running_max[r];
  }
  rows.max_score = fmaxf(rows.max_score, threadIdx.x % 2 ? largest[1] : largest[0]);
  const bool rescale =
      __any_sync(~0u, new_max[0] != rows.running_max[0] || new_max[1] != rows.running_max[1]);
  float base[2], to_log2 = units.scale_log2;
#pragma unroll
  for (int r = 0; r < 2; ++r) base[r] = finite_max(new_max[r]) * units.scale_log2;
  // One branch for everything that is rare, because it ends a basic block.
  if (__builtin_expect(rescale || rows.huge, 0)) {
    const float from[2] = {units.natural(finite_max(new_max[0])),
                           units.natural(finite_max(new_max[1]))};
    if (rescale) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[r] = exp2_approx((units.natural(rows.running_max[r]) - from[r]) * kLog2E);
        rows.sum[r] *= factor[r];
        rows.running_max[r] = new_max[r];
      }
      rows.huge = __any_sync(~0u, fmaxf(fabsf(base[0]), fabsf(base[1])) > kHugeRow);
    }
    if (__builtin_expect(rows.huge, 0)) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] = units.natural(s[i]) - from[i / 2 % 2];
      base[0] = base[1] = 0.f, to_log2 = kLog2E;
    }
  }
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    s[i] = exp2_approx(fmaf(s[i], to_log2, -base[i / 2 % 2]));
    sum[i % 4] += s[i];
  }
  rows.sum[0] += sum[0] + sum[1];
  rows.sum[1] += sum[2] + sum[3];
  return rescale;
}

// What the forward pass stores for a row, and the factor of its accumulator.
struct RowResult {
  float factor, max_logit, log_sum;
};

// Returns the results of row r of a thread. `nonempty` says whether the row met any key tile, and
// `sink` points to its attention sink, if any. The whole warp calls this.
template <bool kNatural>
__device__ __forceinline__ RowResult row_result(const RowState& rows,
                                                const ScoreUnits<kNatural>& units, int r,
                                                bool nonempty, const float* sink) {
  const float total = nonempty ? rows.total(r) : 0.f;
  const float from = finite_max(rows.running_max[r]), base = from * units.scale_log2;
  // Returns the exponent of x, in natural units, relative to the running maximum.
  const auto exponent = [&](float x) {
    return fabsf(base) > kHugeRow ? (x - units.natural(from)) * kLog2E : fmaf(x, kLog2E, -base);
  };
  const float max_logit =
      units.natural(__shfl_sync(~0u, rows.max_score, threadIdx.x % 32 / 2 * 2 + r));
  const float weight = sink ? exp2_approx(exponent(*sink)) : 0.f;
  if (total == 0.f) return {kUndefined, -INFINITY, 0.f};
  return {reciprocal_approx(total + weight), max_with_nan(max_logit, total),
          (log2_approx(total) - exponent(max_logit)) * kLn2};
}

}  // namespace jax_dsa::masked_attention
