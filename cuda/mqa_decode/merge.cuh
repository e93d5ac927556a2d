// Merges the results of items that are cut into pieces, whose teams follow each other:
//
//     lse = log sum_p exp(lse_p)      out = gate * sum_p exp(lse_p - lse) out_p
//
// A piece's results are lines of 128 floats (PieceLine), of which a lane has four. A warp has some
// lines at a time, or where parts are many, each warp of a block some of these lines' parts. The
// order in which parts are summed depends on their number alone, so results are the same on every
// run.
#pragma once

#include <cuda_bf16.h>

#include "common/ptx.cuh"
#include "mqa_decode/plan.cuh"
#include "sparse_mla/fwd_rows.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeWarps = kMergeThreads / 32;
inline constexpr int kMergeBlocks = 2;  // of a multiprocessor
inline constexpr int kFewParts = 16;    // of a line, for one warp
inline constexpr int kFewestParts = 3;  // for which it takes four lines
inline constexpr int kMaxLines = 2;     // of a warp among several for a line
inline constexpr int kTeamsOfLane = (kMaxTeams + 31) / 32;

struct Cut {
  int team, item, parts;
};
struct MergeShared {
  int count, parts;  // cuts; parts of the one that has most
  Cut cuts[kMaxTeams];
  float2 rows[kMaxTeams][16];  // of a line's parts, what `partial_rows` has of their rows
  float4 sums[kMergeWarps][kMaxLines][32];
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

// kLines lines of an item that is cut, from `line` of a member's on; with kTogether by a block,
// else by a warp.
template <bool kWide, int kLines, bool kTogether>
struct Merge {
  static constexpr int kRows = kWide ? 2 : 1;    // that a lane has
  static constexpr int kAlike = kWide ? 4 : 16;  // lanes side by side that have the same rows
  // Parts whose loads are under way at a time.
  static constexpr int kBatch = kLines == 4 ? kFewestParts : 16 / kLines;
  static constexpr int kRowsOfLine = kWide ? 16 : 2;
  const Decode& p;
  MergeShared& shared;
  const Cut& cut;
  PieceLine<kWide> at;
  int tile_rows, first_slot, first_row;
  int64_t place[kRows];  // among [batch, queries, heads]
  int head[kRows];
  bool has[kRows];
  int64_t offset;  // in a slot's results

  __device__ __forceinline__ Merge(const Decode& p, MergeShared& shared, const Cut& cut, int member,
                                   int tile_rows, int line)
      : p(p), shared(shared), cut(cut), at(line, p.value_dim), tile_rows(tile_rows) {
    const int per_request = p.groups * p.passes, batch = quotient(cut.item, per_request);
    const int rest = cut.item - batch * per_request, group = quotient(rest, p.passes);
    const int row = ((rest - group * p.passes) * p.members + member) * tile_rows;
    first_slot = (cut.team * p.members + member) * 2;
    first_row = kWide ? line / 32 % 4 * 16 : quotient(line * 128, p.value_dim);
    offset = int64_t{line} * 128 + threadIdx.x % 32 * 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int its = row + at.row + r * 8;
      has[r] = its < p.rows;
      place[r] = p.place(batch, group, has[r] ? its : row);
      head[r] = p.sinks ? batch * p.sinks_stride + group * p.per_group + its % p.per_group : 0;
    }
  }

  // The first part begins its item, the others go on with it.
  __device__ int64_t slot(int part) const {
    return first_slot + int64_t{2} * p.members * part + (part == 0);
  }
  __device__ float2 row(int part, int r) const {
    if (kTogether) return shared.rows[part][at.row + r * 8 - first_row];
    return p.partial_rows[slot(part) * tile_rows + at.row + r * 8];
  }

  float4 x[kBatch][kLines];
  __device__ __forceinline__ void load(int first, int last) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float* from = p.partial + slot(first + i) * tile_rows * p.value_dim + offset;
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        if (first + i < last) x[i][j] = *reinterpret_cast<const float4*>(from + j * 128);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = kTogether ? cut.parts * warp / kMergeWarps : 0;
    const int last = kTogether ? cut.parts * (warp + 1) / kMergeWarps : cut.parts;
    load(first, last);  // before anything waits
    if constexpr (kTogether) {
      for (int i = threadIdx.x; i < cut.parts * kRowsOfLine; i += kMergeThreads) {
        const int part = i / kRowsOfLine, row = i % kRowsOfLine;
        if (first_row + row < tile_rows) {
          shared.rows[part][row] = p.partial_rows[slot(part) * tile_rows + first_row + row];
        }
      }
      __syncthreads();
    }
    float base[kRows], factor[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float top = -INFINITY, highest = -INFINITY, total = 0.f;
#pragma unroll 4
      for (int part = lane % kAlike; part < cut.parts; part += kAlike) {
        const float2 found = row(part, r);
        top = fmaxf(top, found.x);
        highest = fmaxf(highest, found.y);
      }
#pragma unroll
      for (int i = kAlike / 2; i > 0; i /= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, i));
      }
      base[r] = sparse_mla::Rows::finite(top);
#pragma unroll 4
      for (int part = lane % kAlike; part < cut.parts; part += kAlike) {
        total += exp2_approx((row(part, r).x - base[r]) * kLog2E);
      }
#pragma unroll
      for (int i = kAlike / 2; i > 0; i /= 2) total += __shfl_xor_sync(~0u, total, i);
      const bool empty = total == 0.f;
      const float lse = empty ? -INFINITY : top + log2f(total) * kLn2;
      factor[r] = empty ? 0.f : 1.f / total;
      if (p.sinks && !empty && has[r]) factor[r] /= sparse_mla::sink_divisor(p.sinks[head[r]], lse);
      if (at.column == 0 && has[r]) {
        p.lse[place[r]] = lse;
        if (p.top) p.top[place[r]] = isnan(total) ? total : highest;
      }
    }
    float4 y[kLines] = {};
#pragma unroll 1
    for (int part = first; part < last; part += kBatch) {
      if (part > first) load(part, last);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (part + i >= last) break;
        float weight[2];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          weight[r] = exp2_approx((row(part + i, r).x - base[r]) * kLog2E) * factor[r];
        }
        if (kRows == 1) weight[1] = weight[0];
#pragma unroll
        for (int j = 0; j < kLines; ++j) {
          y[j].x += weight[0] * x[i][j].x;
          y[j].y += weight[0] * x[i][j].y;
          y[j].z += weight[1] * x[i][j].z;
          y[j].w += weight[1] * x[i][j].w;
        }
      }
    }
    if constexpr (kTogether) {
#pragma unroll
      for (int j = 0; j < kLines; ++j) shared.sums[warp][j][lane] = y[j];
      __syncthreads();
      if (warp < kLines) {
        float4 z = {};
#pragma unroll
        for (int w = 0; w < kMergeWarps; ++w) {
          const float4 its = shared.sums[w][warp][lane];
          z.x += its.x, z.y += its.y, z.z += its.z, z.w += its.w;
        }
        store(warp, z);
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int j = 0; j < kLines; ++j) store(j, y[j]);
    }
  }

  __device__ __forceinline__ void store(int j, float4 y) const {
    const auto to = [&](auto* out) {
      out += at.column + j * PieceLine<kWide>::kColumns;
      constexpr int kSecond = kRows - 1, kAfter = kWide ? 0 : 2;
      store_pair(out + place[0] * p.value_dim, y.x, y.y, has[0]);
      store_pair(out + place[kSecond] * p.value_dim + kAfter, y.z, y.w, has[kSecond]);
    };
    if (p.top) {
      to(static_cast<float*>(p.out));
    } else {
      to(static_cast<__nv_bfloat16*>(p.out));
    }
  }
};

template <bool kWide, int kLines, bool kTogether>
__device__ void merge_lines(const Decode& p, MergeShared& shared, int tile_rows) {
  const int per_member = tile_rows * p.value_dim / (128 * kLines);
  const int per_cut = p.members * per_member, jobs = shared.count * per_cut;
  const int first =
      kTogether ? blockIdx.x : blockIdx.x * kMergeWarps + static_cast<int>(threadIdx.x) / 32;
  for (int job = first; job < jobs; job += gridDim.x * (kTogether ? 1 : kMergeWarps)) {
    const int number = quotient(job, per_cut), rest = job - number * per_cut;
    const int member = quotient(rest, per_member);
    Merge<kWide, kLines, kTogether>(p, shared, shared.cuts[number], member, tile_rows,
                                    (rest - member * per_member) * kLines)
        .run();
  }
}

template <bool kWide, int kLines>
__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks)
    merge_kernel(const __grid_constant__ Decode p, int tile_rows) {
  auto& shared = dynamic_shared<MergeShared>();
  wait_for_previous();
  if (threadIdx.x < 32) find_cuts(p, shared);
  __syncthreads();
  if (kWide && shared.parts <= kFewestParts) {
    merge_lines<kWide, kWide ? 4 : kLines, false>(p, shared, tile_rows);
  } else if (shared.parts <= kFewParts) {
    merge_lines<kWide, kLines, false>(p, shared, tile_rows);
  } else {
    merge_lines<kWide, kLines, true>(p, shared, tile_rows);
  }
}

}  // namespace jax_dsa::mqa_decode
