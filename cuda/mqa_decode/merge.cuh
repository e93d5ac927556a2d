// Merges the results of items that are cut into pieces, whose teams follow each other:
//
//     lse = log sum_p exp(lse_p)      out = gate * sum_p exp(lse_p - lse) out_p
//
// A warp has a row at a time, or where parts are many, each warp of a block some of a row's parts.
// The order in which parts are summed depends on their number alone, so results are the same on
// every run.
#pragma once

#include <cuda_bf16.h>

#include "common/ptx.cuh"
#include "mqa_decode/plan.cuh"
#include "sparse_mla/fwd_rows.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeWarps = kMergeThreads / 32;
inline constexpr int kMergeBlocks = 2;                   // of a multiprocessor
inline constexpr int kFewParts = 8;                      // of a row, for one warp
inline constexpr int kQuads = kSparseMlaValueDim / 128;  // of columns, that a lane has of a row
inline constexpr int kTeamsOfLane = (kMaxTeams + 31) / 32;

struct Cut {
  int team, item, parts;
};
struct MergeShared {
  int count, parts;  // cuts; parts of the one that has most
  Cut cuts[kMaxTeams];
  float4 sums[kMergeWarps][kQuads][32];
};

// The items that are cut; by a warp.
__device__ inline void find_cuts(const Decode& p, MergeShared& shared) {
  const int lane = threadIdx.x % 32;
  int2 found[kTeamsOfLane];
#pragma unroll
  for (int i = 0; i < kTeamsOfLane; ++i) {
    const int team = i * 32 + lane;
    found[i] = team < p.teams ? p.cuts[team] : make_int2(0, 0);
  }
  int count = 0, parts = 0;
#pragma unroll
  for (int i = 0; i < kTeamsOfLane; ++i) {
    parts = max(parts, found[i].y);
    const uint32_t has = __ballot_sync(~0u, found[i].y > 0);
    if (found[i].y > 0) {
      const int before = __popc(has & ((1u << lane) - 1));
      shared.cuts[count + before] = {i * 32 + lane, found[i].x, found[i].y};
    }
    count += __popc(has);
  }
  parts = __reduce_max_sync(~0u, parts);
  if (lane == 0) shared.count = count, shared.parts = parts;
}

// A row of an item that is cut: where it is in the results, and its parts.
struct CutRow {
  const Decode& p;
  int parts, batch, head, place;  // place: -1 if the item has no such row
  int64_t first, step;  // of the partial rows: that of part 0, if it were like the others, and on

  __device__ CutRow(const Decode& p, const Cut& cut, int member, int tile_rows, int row)
      : p(p), parts(cut.parts) {
    const int per_request = p.groups * p.passes;
    batch = cut.item / per_request;
    const int rest = cut.item - batch * per_request, group = rest / p.passes;
    const int of_group = ((rest - group * p.passes) * p.members + member) * tile_rows + row;
    head = group * p.per_group + of_group % p.per_group;
    place = of_group < p.rows ? p.place(batch, group, of_group) : -1;
    step = int64_t{2} * p.members * tile_rows;
    first = cut.team * step + 2 * member * tile_rows + row;
    begun = tile_rows;
  }
  // The first part begins its item, the others go on with it.
  __device__ int64_t partial_row(int part) const {
    return first + part * step + (part == 0 ? begun : 0);
  }
  __device__ float lse(int part) const { return p.partial_rows[partial_row(part)].x; }

 private:
  int begun;
};

// Adds up a row's parts first..last-1, each with its weight; by a warp, a lane has four columns of
// every 128. Returns its lse. The first warp, if it has the whole row, stores what it has of it.
struct RowSum {
  static constexpr int kBatch = 4;  // parts whose loads are under way at a time
  float4 x[kBatch][kQuads];
  float4 y[kQuads] = {};
  float top = -INFINITY, highest = -INFINITY, factor;

  __device__ __forceinline__ void load(const CutRow& row, int first, int last) {
    const int column = threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float* from = row.p.partial + row.partial_row(first + i) * row.p.value_dim + column;
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
        if (first + i < last && column + j * 128 < row.p.value_dim) {
          x[i][j] = *reinterpret_cast<const float4*>(from + j * 128);
        }
      }
    }
  }

  __device__ __forceinline__ void add(const CutRow& row, int first, int last) {
    const int lane = threadIdx.x % 32;
    load(row, first, last);  // before anything waits
    for (int part = lane; part < row.parts; part += 32) {
      const float2 found = row.p.partial_rows[row.partial_row(part)];
      top = fmaxf(top, found.x);
      highest = fmaxf(highest, found.y);
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, i));
    }
    const float base = sparse_mla::Rows::finite(top);
    float total = 0.f;
    for (int part = lane; part < row.parts; part += 32) {
      total += exp2_approx((row.lse(part) - base) * kLog2E);
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) total += __shfl_xor_sync(~0u, total, i);
    const bool empty = total == 0.f;
    const float lse = empty ? -INFINITY : top + log2f(total) * kLn2;
    factor = empty ? 0.f : 1.f / total;
    if (row.p.sinks && !empty) {
      const float sink = row.p.sinks[int64_t{row.batch} * row.p.sinks_stride + row.head];
      factor /= sparse_mla::sink_divisor(sink, lse);
    }
    if (lane == 0) {
      row.p.lse[row.place] = lse;
      if (row.p.top) row.p.top[row.place] = highest;
    }
#pragma unroll 1
    for (int part = first; part < last; part += kBatch) {
      if (part > first) load(row, part, last);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (part + i >= last) break;
        const float weight = exp2_approx((row.lse(part + i) - base) * kLog2E) * factor;
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          y[j].x += weight * x[i][j].x;
          y[j].y += weight * x[i][j].y;
          y[j].z += weight * x[i][j].z;
          y[j].w += weight * x[i][j].w;
        }
      }
    }
  }
};

__device__ __forceinline__ void store_quad(const CutRow& row, int quad, float4 y) {
  const Decode& p = row.p;
  const int column = quad * 128 + static_cast<int>(threadIdx.x) % 32 * 4;
  if (column >= p.value_dim) return;
  const int64_t at = int64_t{row.place} * p.value_dim + column;
  const auto store = [&](auto* to) {
    store_pair(to, y.x, y.y, true);
    store_pair(to + 2, y.z, y.w, true);
  };
  if (p.top) {
    store(static_cast<float*>(p.out) + at);
  } else {
    store(static_cast<__nv_bfloat16*>(p.out) + at);
  }
}

// Rows of which every warp has one of its own, or rows that the block has together.
template <bool kTogether>
__device__ void merge_rows(const Decode& p, MergeShared& shared, int tile_rows) {
  const int warp = threadIdx.x / 32;
  const int per_cut = p.members * tile_rows, rows = shared.count * per_cut;
  const int first = kTogether ? blockIdx.x : blockIdx.x * kMergeWarps + warp;
  for (int i = first; i < rows; i += gridDim.x * (kTogether ? 1 : kMergeWarps)) {
    const int number = i / per_cut, rest = i - number * per_cut, member = rest / tile_rows;
    const CutRow row(p, shared.cuts[number], member, tile_rows, rest - member * tile_rows);
    if (row.place < 0) continue;
    RowSum sum;
    if constexpr (kTogether) {
      const int parts = row.parts;
      sum.add(row, parts * warp / kMergeWarps, parts * (warp + 1) / kMergeWarps);
#pragma unroll
      for (int j = 0; j < kQuads; ++j) shared.sums[warp][j][threadIdx.x % 32] = sum.y[j];
      __syncthreads();
      if (warp < kQuads) {
        float4 y = {};
#pragma unroll
        for (int w = 0; w < kMergeWarps; ++w) {
          const float4 x = shared.sums[w][warp][threadIdx.x % 32];
          y.x += x.x, y.y += x.y, y.z += x.z, y.w += x.w;
        }
        store_quad(row, warp, y);
      }
      __syncthreads();
    } else {
      sum.add(row, 0, row.parts);
#pragma unroll
      for (int j = 0; j < kQuads; ++j) store_quad(row, j, sum.y[j]);
    }
  }
}

__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks)
    merge_kernel(const __grid_constant__ Decode p, int tile_rows) {
  auto& shared = dynamic_shared<MergeShared>();
  wait_for_previous();
  if (threadIdx.x < 32) find_cuts(p, shared);
  __syncthreads();
  if (shared.parts <= kFewParts) {
    merge_rows<false>(p, shared, tile_rows);
  } else {
    merge_rows<true>(p, shared, tile_rows);
  }
}

}  // namespace jax_dsa::mqa_decode
