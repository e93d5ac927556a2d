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

// A row is huge if its largest score is beyond this magnitude, in log2 units. Up to here,
// exp2(fma(score, scale, -largest)) is exact enough: rounding of `largest` changes all
// probabilities of the row by the same factor, at most 2^(2^-14). Scores of huge rows have no
// fractional bits to spare. A bias may give all keys of a row the score -1e9 or less, for example.
// The largest score is therefore subtracted first, which is exact, in a branch that is rarely
// taken.
inline constexpr float kHugeRow = 0x1p10f;

// What the backward pass subtracts from the scores of a huge row, in natural units and in this
// order. Both are 0 for other rows. See kHugeRow.
struct HugeRow {
  float max_logit, log_sum;
};

// Subtracts them from the scores of one thread, which are in natural units if kNatural and
// otherwise lack the scale. The results are in natural units. `rows` are those of the queries of a
// step. The product with the scale is rounded as in the forward pass.
template <bool kNatural, int kScores>
__device__ __forceinline__ void subtract_huge_rows(float (&s)[kScores], const HugeRow* rows,
                                                   float scale) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const volatile HugeRow* row = rows + (i / 4 * 8 + thread_index() % 4 * 2 + i % 2);
    s[i] = (kNatural ? s[i] : __fmul_rn(s[i], scale)) - row->max_logit - row->log_sum;
  }
}

// Stores the derivatives of the softcap, 1 - (y / softcap)^2, at capped scores y. chunk(k) is the
// address of a lane for the scores of 16 columns. They go through shared memory, because there are
// no registers for them while the probabilities are computed. (They cannot be recovered from
// rounded probabilities, because those of saturated scores are almost 0.)
template <DType kType, int kScores, typename Chunk>
__device__ __forceinline__ void store_cap_derivatives(const float (&s)[kScores], float inverse,
                                                      Chunk chunk) {
  const auto derivative = [&](float y) { return 1.f - y * inverse * (y * inverse); };
#pragma unroll
  for (int k = 0; k < kScores / 8; ++k) {
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 8 * k + 2 * j;
      x[j] = pack_16<kType>(derivative(s[i]), derivative(s[i + 1]));
    }
    store_matrix_x4(chunk(k), x[0], x[1], x[2], x[3]);
  }
}

// Multiplies eight values by the derivatives at this address.
template <DType kType>
__device__ __forceinline__ void multiply_by_cap_derivatives(float* x, uint32_t address) {
  uint32_t y[4];
  load_matrix_x4(address, y);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 z = unpack_16<kType>(y[j]);
    x[2 * j] *= z.x, x[2 * j + 1] *= z.y;
  }
}

// Returns dS of two neighbouring scores from x, their probabilities times the derivative of the
// softcap, and from dP - delta. dP is undefined where the mask hides a score, so multiply only
// where x is not 0.
__device__ __forceinline__ float2 score_gradients(float2 x, float2 dp, bool partial) {
  float2 ds = {x.x * dp.x, x.y * dp.y};
  if (partial) ds.x = x.x == 0.f ? 0.f : ds.x, ds.y = x.y == 0.f ? 0.f : ds.y;
  return ds;
}

}  // namespace jax_dsa::masked_attention
