// Sparse MLA, decode: the forward kernel (fwd.cuh) for so few queries that their heads alone would
// leave most of the GPU idle.
//
// The results of the splits are combined as common/combine_splits.cuh says.
//
// Tiling. Each (query, KV head group, 64 heads) is divided into KV splits p. With n splits, each
// split processes every n-th tile of the selected keys. A second kernel combines the splits.
//
// The MMA warpgroups are the forward kernel's (mla/consumer.cuh), with the same tiles, shared
// memory and barriers. Two things differ. Keys may come through a page table, as FP8 records, or
// both; the records are unpacked to bf16 in shared memory (decode_producer.cuh). Results go to
// `out` if there is one split, and otherwise as float32 to `partial`. A split without a valid slot
// writes only its maximum of -inf and its sum of 0 there.
//
// Combine kernel. A CTA processes 16 rows (those of one warp of the forward kernel) and 64 columns,
// each of its 8 warps 8 columns. Splits are added in order, so results are the same on every run.
#pragma once

#include "common/combine_splits.cuh"
#include "common/limits.h"
#include "mla/consumer.cuh"
#include "mla/rows.cuh"
#include "sparse_mla/decode_plan.cuh"
#include "sparse_mla/decode_producer.cuh"
#include "sparse_mla/fwd.cuh"

namespace jax_dsa::sparse_mla {

// With one split per work tile, its results are final.
template <int kSide>
__device__ __forceinline__ void write_results(const Decode& p, int work_index,
                                              const float (&o)[128], const mla::Rows& rows,
                                              uint32_t staging) {
  write_results<kSide>(static_cast<const SparseMlaFwdParams&>(p),
                       WorkSplit(p, work_index).work_tile, o, rows, staging);
}

// Stores are predicated instead of branched around. A wgmma is in flight meanwhile, and the
// compiler would make it finish before a branch.
template <int kSide>
__device__ __forceinline__ void write_results(const SplitDecode& p, int work_index,
                                              const float (&o)[128], const mla::Rows& rows,
                                              uint32_t) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const WorkSplit split(p, work_index);
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = rows.total(r);
    factor[r] = total == 0.f ? 0.f : 1.f / total;
    if (kSide == 0 && lane % 4 == 0) {
      partial_rows(p, split.work_tile, split.index)[warp * 16 + r * 8 + lane / 4] =
          make_float2(rows.running_max[r], total);
    }
  }
  const bool any = __any_sync(~0u, (factor[0] != 0.f) | (factor[1] != 0.f));
  const bool needed = any & (warp * 16 < WorkTile(p, split.work_tile).heads);
  float4* to = partial_columns(p, split.work_tile, split.index, kSide, warp) + lane;
#pragma unroll
  for (int i = 0; i < kColumnGroups; ++i) {
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __float_as_uint(o[i * 4 + j] * factor[j / 2]);
    store_16(to + i * 32, x, needed);
  }
}

template <int kD, bool kRecords, typename Params>
__global__ void __launch_bounds__(mla::kThreads, 1)
    decode_kernel(const __grid_constant__ Params p) {
  constexpr int kConsumer = 216, kProducer = 72;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<DecodeShared<kD, kRecords>>();
  mla::initialise(shared);
  launch_dependents();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    raise_registers<kConsumer>();
    mla::consume<kD, 0>(p, shared);
  } else if (warpgroup == 1) {
    raise_registers<kConsumer>();
    mla::consume<kD, 1>(p, shared);
  } else {
    lower_registers<kProducer>();
    produce<kD, kRecords>(p, shared);
  }
}

inline constexpr int kCombineThreads = 256;
inline constexpr int kCombineCtas = 8;  // per 16 rows; 64 columns each

struct CombineShared {
  float weight[kSparseMlaMaxSplits][16];  // of each split and row in the output
};

// Returns how many strips of 16 rows a work tile has.
__host__ __device__ inline int row_strips(const Decode& p) {
  return ceil_div(min(p.heads / p.groups, mla::kHeads), 16);
}

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
                                              : make_float2(-INFINITY, 0.f);
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
      if (lane + i * 32 < p.splits) shared.weight[lane + i * 32][r] = weight[i] * combined.factor;
    }
    if (column_block == 0 && lane == 0 && r < rows) {
      p.max_logit[head + r] = combined.max;
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
      // The output of a split without weight is undefined.
      y[0] += a == 0.f ? 0.f : a * x[i].x;
      y[1] += a == 0.f ? 0.f : a * x[i].y;
      y[2] += b == 0.f ? 0.f : b * x[i].z;
      y[3] += b == 0.f ? 0.f : b * x[i].w;
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
