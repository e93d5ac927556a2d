// Sparse MLA, decode: the forward kernel (fwd.cuh) for so few queries that their heads alone would
// leave most of the GPU idle. Each (query, group, 64 heads) is split into parts, every part takes
// every so-manieth tile of the selected keys, and a second kernel merges the parts' results:
//
//     lse = log sum_p exp(lse_p)      out = gate * sum_p exp(lse_p - lse) out_p
//
// The warpgroups that compute are the forward's, with the same tiles, shared memory and barriers.
// What differs is where keys come from (decode_producer.cuh): through a page table, as FP8 records
// that are unpacked to bf16 on the way into the tile, or both. And where results go: with one part,
// to `out`, else as f32 to `partial`. A part without any valid slot leaves only lse = -inf there.
//
// Merging: a block has 16 rows (a warp's of the forward) and 64 columns, each of its 8 warps 8
// columns. Parts are summed in order, so results are the same on every run.
#pragma once

#include "common/combine_splits.cuh"
#include "common/limits.h"
#include "mla/consumer.cuh"
#include "mla/rows.cuh"
#include "sparse_mla/decode_plan.cuh"
#include "sparse_mla/decode_producer.cuh"
#include "sparse_mla/fwd.cuh"

namespace jax_dsa::sparse_mla {

// With one part an item, its results are final.
template <int kSide>
__device__ __forceinline__ void write_results(const Decode& p, int number, const float (&o)[128],
                                              const mla::Rows& rows, uint32_t stage) {
  write_results<kSide>(static_cast<const SparseMlaFwdParams&>(p), Part(p, number).item, o, rows,
                       stage);
}

// Stores are predicated, not branched around: wgmma runs meanwhile, and a branch would make the
// compiler wait for it.
template <int kSide>
__device__ __forceinline__ void write_results(const SplitDecode& p, int number,
                                              const float (&o)[128], const mla::Rows& rows,
                                              uint32_t) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const Part part(p, number);
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = rows.total(r);
    factor[r] = total == 0.f ? 0.f : 1.f / total;
    if (kSide == 0 && lane % 4 == 0) {
      partial_lse(p, part.item, part.split)[warp * 16 + r * 8 + lane / 4] = rows.lse(r, total);
    }
  }
  const bool any = __any_sync(~0u, (factor[0] != 0.f) | (factor[1] != 0.f));
  const bool needed = any & (warp * 16 < Item(p, part.item).heads);
  float4* to = partial_pieces(p, part.item, part.split, kSide, warp) + lane;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
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

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeBlocks = 8;  // of 64 columns, for 16 rows

struct MergeShared {
  float weight[kSparseMlaMaxSplits][16];  // of a part's row in the output
};

// Strips of 16 rows of an item.
__host__ __device__ inline int merge_strips(const Decode& p) {
  return ceil_div(min(p.heads / p.groups, mla::kHeads), 16);
}

__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Decode p) {
  auto& shared = dynamic_shared<MergeShared>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column_block = blockIdx.x % kMergeBlocks;
  const int strips = merge_strips(p), strip = blockIdx.x / kMergeBlocks % strips;
  const int number = blockIdx.x / kMergeBlocks / strips;
  const Item item(p, number);
  if (strip * 16 >= item.heads) return;
  const int64_t head = item.token * p.heads + item.head + strip * 16;
  const int rows = min(item.heads - strip * 16, 16);

  // 16 parts' loads at a time, the first of them before anything waits.
  constexpr int kBatch = 16;
  const int side = column_block / 4, piece = column_block % 4 * 8 + warp;
  const float4* from = partial_pieces(p, number, 0, side, strip) + piece * 32 + lane;
  constexpr int kPart = 2 * 4 * kPieces * 32;
  float4 x[kBatch];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < p.splits) x[i] = from[(first + i) * kPart];
    }
  };
  grid_dependency_wait();
  load(0);

  // Weights of rows 2 * warp and the next: a lane has the parts lane and lane + 32.
#pragma unroll
  for (int r = warp * 2; r < warp * 2 + 2; ++r) {
    float lse[2], weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int split = lane + i * 32;
      lse[i] =
          r < rows && split < p.splits ? partial_lse(p, number, split)[strip * 16 + r] : -INFINITY;
    }
    const float max_lse = max_over_lanes(fmaxf(lse[0], lse[1]));
#pragma unroll
    for (int i = 0; i < 2; ++i) weight[i] = split_weight(lse[i], max_lse);
    CombinedRow combined(max_lse, sum_over_lanes(weight[0] + weight[1]));
    if (p.sinks && !combined.empty && r < rows) {
      combined.apply_sink(
          p.sinks[int64_t{item.batch} * p.sinks_stride + item.head + strip * 16 + r]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane + i * 32 < p.splits) shared.weight[lane + i * 32][r] = weight[i] * combined.factor;
    }
    if (column_block == 0 && lane == 0 && r < rows) p.lse[head + r] = combined.lse;
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
      // A part without weight may be anything.
      y[0] += a == 0.f ? 0.f : a * x[i].x;
      y[1] += a == 0.f ? 0.f : a * x[i].y;
      y[2] += b == 0.f ? 0.f : b * x[i].z;
      y[3] += b == 0.f ? 0.f : b * x[i].w;
    }
  }
  const int column = side * 256 + piece * 8 + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + r * 8 >= rows) continue;
    auto* out = static_cast<__nv_bfloat16*>(p.out) + (head + row + r * 8) * kMlaValueDim;
    *reinterpret_cast<uint32_t*>(out + column) = pack_bf16(y[2 * r], y[2 * r + 1]);
  }
}

}  // namespace jax_dsa::sparse_mla
