// Combines the results of the splits of sparse MLA decode, as common/combine_splits.cuh says.
//
// A CTA processes 16 rows and 64 columns, each of its 8 warps 8 columns. Splits are added in order,
// so results are the same on every run.
#pragma once

#include <cuda_bf16.h>

#include "common/combine_splits.cuh"
#include "common/ptx.cuh"
#include "sparse_mla/decode_plan.cuh"

namespace jax_dsa::sparse_mla {

inline constexpr int kCombineThreads = 256;

struct CombineShared {
  float weight[kSparseMlaMaxSplits][16];  // of each split and row in the output
};

__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ Decode p) {
  auto& shared = dynamic_shared<CombineShared>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column_block = blockIdx.x % kCombineCtas;
  const int strips = row_strips(p), strip = blockIdx.x / kCombineCtas % strips;
  const int work_index = blockIdx.x / kCombineCtas / strips;
  const WorkTile work_tile(p, work_index);
  if (strip * 16 >= work_tile.heads) return;
  const int64_t head = work_tile.token * p.heads + work_tile.head + strip * 16;
  const int rows = min(work_tile.heads - strip * 16, 16);

  // Load 16 splits at a time, the first batch before anything waits.
  constexpr int kBatch = 16;
  const int side = column_block / 4, column_group = column_block % 4 * 8 + warp;
  const float4* from = partial_columns(p, work_index, 0, side, strip) + column_group * 32 + lane;
  constexpr int kSplitStride = 2 * 4 * kColumnGroups * 32;
  float4 x[kBatch];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < p.splits) x[i] = from[(first + i) * kSplitStride];
    }
  };
  grid_dependency_wait();
  load(0);

  // Compute the weights of rows 2 * warp and 2 * warp + 1. A lane has the splits lane and lane +
  // 32.
#pragma unroll
  for (int r = warp * 2; r < warp * 2 + 2; ++r) {
    float2 found[2];  // maximum and sum
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int split = lane + i * 32;
      found[i] = r < rows && split < p.splits ? partial_rows(p, work_index, split)[strip * 16 + r]
                                              : make_float2(-INFINITY, kNoSum);
    }
    const float max = max_over_lanes(fmaxf(found[0].x, found[1].x));
#pragma unroll
    for (int i = 0; i < 2; ++i) weight[i] = split_weight(found[i].x, found[i].y, max);
    CombinedRow combined(max, sum_over_lanes(weight[0] + weight[1]));
    if (p.sinks && !combined.empty && r < rows) {
      combined.apply_sink(
          p.sinks[int64_t{work_tile.batch} * p.sinks_stride + work_tile.head + strip * 16 + r]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // The output of a split without a key tile is undefined.
      if (lane + i * 32 < p.splits) {
        shared.weight[lane + i * 32][r] =
            is_no_sum(found[i].y) ? kUndefined : weight[i] * combined.factor;
      }
    }
    if (column_block == 0 && lane == 0 && r < rows) {
      p.max_logit[head + r] = max_with_nan(combined.max, combined.total);
      p.log_sum[head + r] = log_of_sum(combined.total);
    }
  }
  __syncthreads();

  const int row = lane / 4;
  float y[4] = {};
  for (int first = 0; first < p.splits; first += kBatch) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= p.splits) continue;
      const float a = shared.weight[first + i][row], b = shared.weight[first + i][row + 8];
      y[0] += scale_output(x[i].x, a);
      y[1] += scale_output(x[i].y, a);
      y[2] += scale_output(x[i].z, b);
      y[3] += scale_output(x[i].w, b);
    }
  }
  const int column = side * 256 + column_group * 8 + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + r * 8 >= rows) continue;
    auto* out = static_cast<__nv_bfloat16*>(p.out) + (head + row + r * 8) * kMlaValueDim;
    *reinterpret_cast<uint32_t*>(out + column) = pack_bf16(y[2 * r], y[2 * r + 1]);
  }
}

}  // namespace jax_dsa::sparse_mla
