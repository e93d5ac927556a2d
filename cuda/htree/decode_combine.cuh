// Combines the splits of decode: out = sum of the splits' outputs / sum of their probabilities.
#pragma once

#include "common/limits.h"
#include "htree/decode_plan.cuh"

namespace jax_dsa::htree {

inline constexpr int kCombineThreads = 256;

// A CTA combines half of the dimensions of one head of one query. A thread group handles one split
// at a time; each of its threads has 4 columns and loads several splits ahead.
template <int kD>
struct CombineShared {
  static constexpr int kColumns = kD / 2, kGroupThreads = kColumns / 4;
  static constexpr int kGroups = kCombineThreads / kGroupThreads;
  float outputs[kGroups][kColumns];
  float2 max_and_sum[kGroups];
};

template <int kD>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ DecodePlan x) {
  using Shared = CombineShared<kD>;
  constexpr int kGroups = Shared::kGroups, kColumns = Shared::kColumns;
  constexpr int kAhead = ceil_div(kMaxSms, kGroups);
  auto& shared = dynamic_shared<Shared>();
  const HTreeFwdParams& p = x.plan.p;
  const int group = threadIdx.x / Shared::kGroupThreads;
  const int group_thread = threadIdx.x % Shared::kGroupThreads;
  const int heads = x.plan.group_heads, padded = x.plan.head_tiles * kTileHeads;
  const int half = blockIdx.x % 2, head = blockIdx.x / 2 % heads;
  const int64_t row = blockIdx.x / 2 / heads, bg = row / p.queries;
  const int64_t first = row * x.splits * padded + head;
  grid_dependency_wait();
  float top = -INFINITY, total = 0.f;
  float4 sum = {};
#pragma unroll 1
  for (int i = group; i < x.splits; i += kGroups * kAhead) {
    float2 max_and_sum[kAhead];
    float4 outputs[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      max_and_sum[j] = make_float2(-INFINITY, 0.f), outputs[j] = {};
      const int split = i + j * kGroups;
      const int64_t at = first + int64_t{split} * padded;
      if (split < x.splits) {
        max_and_sum[j] = x.max_and_sum[at];
        outputs[j] =
            reinterpret_cast<const float4*>(x.outputs + at * kD + half * kColumns)[group_thread];
      }
    }
    float next = top;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next = fmaxf(next, max_and_sum[j].x);
    const float factor = exp2_approx((top - finite_max(next)) * kLog2E);
    top = next, total *= factor;
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const float weight = exp2_approx((max_and_sum[j].x - finite_max(top)) * kLog2E);
      const float4 y = outputs[j];
      total += weight * max_and_sum[j].y;
      sum.x += weight * y.x, sum.y += weight * y.y, sum.z += weight * y.z, sum.w += weight * y.w;
    }
  }
  reinterpret_cast<float4*>(shared.outputs[group])[group_thread] = sum;
  if (group_thread == 0) shared.max_and_sum[group] = make_float2(top, total);
  __syncthreads();
  const int d = threadIdx.x;
  if (d >= kColumns) return;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) top = fmaxf(top, shared.max_and_sum[i].x);
  float all = 0.f, weights = 0.f;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const float weight = exp2_approx((shared.max_and_sum[i].x - finite_max(top)) * kLog2E);
    all += weight * shared.outputs[i][d], weights += weight * shared.max_and_sum[i].y;
  }
  const int64_t token = bg / p.groups * p.queries + row % p.queries;
  const int64_t to = token * p.heads + bg % p.groups * heads + head;
  // Undo the column order of ValueTile::multiply.
  const int column = half * kColumns + d, dimension = column / 64 * 64 + d % 8 * 8 + column / 8 % 8;
  static_cast<__nv_bfloat16*>(p.out)[to * kD + dimension] =
      __float2bfloat16(weights == 0.f ? 0.f : all / weights);
  if (column == 0) {
    p.max_logit[to] = top;
    p.log_sum[to] = log_of_sum(weights);
  }
}

}  // namespace jax_dsa::htree
