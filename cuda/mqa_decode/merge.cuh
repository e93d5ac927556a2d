// Merges the results of items that are cut into pieces, whose teams follow each other:
//
//     lse = log sum_p exp(lse_p)      out = gate * sum_p exp(lse_p - lse) out_p
//
// A warp has some columns of a row at a time: 128 where parts are few, so that a row is soon done;
// 32 where they are many, so that more loads are under way. Parts are summed in order, so results
// are the same on every run.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "common/ptx.cuh"
#include "mqa_decode/plan.cuh"
#include "sparse_mla/fwd_rows.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kMergeThreads = 128;
inline constexpr int kMergeBlocks = 6;  // of a multiprocessor
inline constexpr int kFewParts = 8;
inline constexpr int kTeamsOfLane = (kMaxTeams + 31) / 32;

struct Cut {
  int team, item, parts;
};
struct MergeShared {
  int count, parts;  // cuts; parts of the one that has most
  Cut cuts[kMaxTeams];
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

// `row` of a row tile of `tile_rows`, the columns from `column` on, kWidth a lane; by a warp.
template <int kWidth>
__device__ __forceinline__ void merge_row(const Decode& p, const Cut& cut, int member,
                                          int tile_rows, int row, int column) {
  const int lane = threadIdx.x % 32;
  const int per_request = p.groups * p.passes, batch = cut.item / per_request;
  const int rest = cut.item - batch * per_request, group = rest / p.passes;
  const int row_of_group = ((rest - group * p.passes) * p.members + member) * tile_rows + row;
  if (row_of_group >= p.rows) return;
  column += lane * kWidth;
  const bool has = column < p.value_dim;
  // The first part begins its item, the others go on with it.
  const auto part_row = [&](int part) {
    const int slot = ((cut.team + part) * p.members + member) * 2 + (part == 0);
    return int64_t{slot} * tile_rows + row;
  };
  // Some parts' loads at a time, the first of them before anything waits.
  constexpr int kBatch = 32 / kWidth;
  using Columns = std::conditional_t<kWidth == 4, float4, float>;
  Columns x[kBatch];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (has && first + i < cut.parts) {
        const float* from = p.partial + part_row(first + i) * p.value_dim + column;
        x[i] = *reinterpret_cast<const Columns*>(from);
      }
    }
  };
  load(0);

  float weight[kTeamsOfLane];  // of the parts lane, lane + 32, ...; their lse to begin with
  float top = -INFINITY, highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kTeamsOfLane; ++i) {
    const int part = i * 32 + lane;
    const float2 found =
        part < cut.parts ? p.partial_rows[part_row(part)] : make_float2(-INFINITY, -INFINITY);
    weight[i] = found.x;
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
#pragma unroll
  for (int i = 0; i < kTeamsOfLane; ++i) {
    weight[i] = exp2_approx((weight[i] - base) * kLog2E);
    total += weight[i];
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) total += __shfl_xor_sync(~0u, total, i);
  const bool empty = total == 0.f;
  const float lse = empty ? -INFINITY : top + log2f(total) * kLn2;
  float factor = empty ? 0.f : 1.f / total;
  const int place = p.place(batch, group, row_of_group);
  if (p.sinks && !empty) {
    const int head = group * p.per_group + row_of_group % p.per_group;
    factor /= sparse_mla::sink_divisor(p.sinks[int64_t{batch} * p.sinks_stride + head], lse);
  }
  if (column == 0) {
    p.lse[place] = lse;
    if (p.top) p.top[place] = highest;
  }

  float y[kWidth] = {};
#pragma unroll
  for (int first = 0; first < kTeamsOfLane * 32; first += kBatch) {
    if (first >= cut.parts) break;
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float its = __shfl_sync(~0u, weight[(first + i) / 32], (first + i) % 32) * factor;
      if (first + i >= cut.parts) continue;
      const auto* columns = reinterpret_cast<const float*>(&x[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) y[j] += its * columns[j];
    }
  }
  if (!has) return;
  const int64_t at = int64_t{place} * p.value_dim + column;
  const auto store = [&](auto* to) {
    if constexpr (kWidth == 4) {
      store_pair(to, y[0], y[1], true);
      store_pair(to + 2, y[2], y[3], true);
    } else {
      *to = y[0];
    }
  };
  if (p.top) {
    store(static_cast<float*>(p.out) + at);
  } else {
    store(static_cast<__nv_bfloat16*>(p.out) + at);
  }
}

template <int kWidth>
__device__ void merge_rows(const Decode& p, const MergeShared& shared, int tile_rows) {
  constexpr int kWarps = kMergeThreads / 32;
  const int slices = ceil_div(p.value_dim, 32 * kWidth);
  const int per_member = tile_rows * slices, per_cut = per_member * p.members;
  const int jobs = shared.count * per_cut;
  for (int job = blockIdx.x * kWarps + threadIdx.x / 32; job < jobs; job += gridDim.x * kWarps) {
    const int cut = job / per_cut, rest = job - cut * per_cut, member = rest / per_member;
    const int row = (rest - member * per_member) / slices;
    const int slice = rest - member * per_member - row * slices;
    merge_row<kWidth>(p, shared.cuts[cut], member, tile_rows, row, slice * 32 * kWidth);
  }
}

__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks)
    merge_kernel(const __grid_constant__ Decode p, int tile_rows) {
  auto& shared = dynamic_shared<MergeShared>();
  wait_for_previous();
  if (threadIdx.x < 32) find_cuts(p, shared);
  __syncthreads();
  if (shared.parts <= kFewParts) {
    merge_rows<4>(p, shared, tile_rows);
  } else {
    merge_rows<1>(p, shared, tile_rows);
  }
}

}  // namespace jax_dsa::mqa_decode
