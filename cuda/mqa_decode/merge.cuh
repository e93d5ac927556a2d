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

#include "common/combine_splits.cuh"
#include "common/ptx.cuh"
#include "mqa_decode/plan.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeWarps = kMergeThreads / 32;
inline constexpr int kMergeBlocks = 2;  // of a SM
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
  float weights[kMaxTeams][16];  // of parts and of a line's rows; each warp's own are kFewParts
  float factors[kMergeWarps][16];
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
  static constexpr int kRows = kWide ? 2 : 1;  // that a lane has
  static constexpr int kRowsOfLine = kWide ? 16 : 2;
  // Lanes that weigh the parts of a row, and of how many they have the lse under way at a time.
  static constexpr int kLanes = kTogether ? (kWide ? 16 : 32) : 32 / kRowsOfLine;
  static constexpr int kRounds = kTogether ? 4 : kFewParts / kLanes;
  // Parts whose loads are under way at a time.
  static constexpr int kBatch = kLines == 4 ? kFewestParts : 16 / kLines;
  const Decode& p;
  MergeShared& shared;
  const Cut& cut;
  const int member, tile_rows, line, first_row, first_slot;
  const int64_t offset;  // in a slot's results

  __device__ __forceinline__ Merge(const Decode& p, MergeShared& shared, const Cut& cut, int member,
                                   int tile_rows, int line)
      : p(p),
        shared(shared),
        cut(cut),
        member(member),
        tile_rows(tile_rows),
        line(line),
        first_row(kWide ? line / 32 % 4 * 16 : quotient(line * 128, p.value_dim)),
        first_slot((cut.team * p.members + member) * 2),
        offset(int64_t{line} * 128 + threadIdx.x % 32 * 4) {}

  // The first part begins its item, the others go on with it.
  __device__ int slot(int part) const { return first_slot + 2 * p.members * part + (part == 0); }

  float4 x[kBatch][kLines];
  __device__ __forceinline__ void load(int first, int last) {
    const int64_t size = tile_rows * p.value_dim;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float* from = p.partial + slot(first + i) * size + offset;
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
    float* weights = shared.weights[kTogether ? 0 : warp * kFewParts];
    float* factors = shared.factors[kTogether ? 0 : warp];

    load(first, last);  // before anything waits

    // What a part's row counts, by the lanes that have that row.
    const int its = lane / kLanes + (kTogether ? warp * (32 / kLanes) : 0),
              at_first = lane % kLanes;
    const bool weighs = its < kRowsOfLine && (kWide || its * p.value_dim < 128);
    float top = -INFINITY, highest = -INFINITY, total = 0.f;
#pragma unroll 1
    for (int base = 0; base < cut.parts; base += kRounds * kLanes) {
      float2 found[kRounds];
#pragma unroll
      for (int k = 0; k < kRounds; ++k) {
        const int part = base + k * kLanes + at_first;
        found[k] = make_float2(-INFINITY, -INFINITY);
        if (weighs && part < cut.parts) {
          found[k] = p.partial_rows[int64_t{slot(part)} * tile_rows + first_row + its];
        }
      }
#pragma unroll
      for (int k = 0; k < kRounds; ++k) {
        const int part = base + k * kLanes + at_first;
        top = fmaxf(top, found[k].x);
        highest = fmaxf(highest, found[k].y);
        if (weighs && part < cut.parts) weights[part * kRowsOfLine + its] = found[k].x;
      }
    }
    const int per_request = p.groups * p.passes, batch = quotient(cut.item, per_request);
    const int rest = cut.item - batch * per_request, group = quotient(rest, p.passes);
    const int row = ((rest - group * p.passes) * p.members + member) * tile_rows;
    top = max_over_lanes<kLanes>(top);
    highest = max_over_lanes<kLanes>(highest);
    if (weighs) {
#pragma unroll 4
      for (int part = at_first; part < cut.parts; part += kLanes) {
        float& weight = weights[part * kRowsOfLine + its];
        weight = split_weight(weight, top);
        total += weight;
      }
    }
    total = sum_over_lanes<kLanes>(total);
    if (weighs && at_first == 0) {
      const int of_group = row + first_row + its;
      const bool has = of_group < p.rows;
      CombinedRow combined(top, total);
      if (p.sinks && !combined.empty && has) {
        const int head = group * p.per_group + of_group % p.per_group;
        combined.apply_sink(p.sinks[batch * p.sinks_stride + head]);
      }
      factors[its] = combined.factor;
      // The job that has the row's first column.
      const int column =
          kWide ? line / 128 * 256 + line % 32 : line * 128 - (first_row + its) * p.value_dim;
      if (has && column <= 0) {
        const int place = p.place(batch, group, of_group);
        p.lse[place] = combined.lse;
        if (p.top) p.top[place] = isnan(total) ? total : highest;
      }
    }
    if constexpr (kTogether) {
      __syncthreads();
    } else {
      __syncwarp();
    }

    const PieceLine<kWide> at(line, p.value_dim);
    const int own = at.row - first_row;
    float4 y[kLines] = {};
#pragma unroll 1
    for (int part = first; part < last; part += kBatch) {
      if (part > first) load(part, last);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (part + i >= last) break;
        float weight[2];
#pragma unroll
        for (int r = 0; r < kRows; ++r) weight[r] = weights[(part + i) * kRowsOfLine + own + r * 8];
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
    float factor[2];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int of_group = row + at.row + r * 8;
      has[r] = of_group < p.rows;
      place[r] = p.place(batch, group, has[r] ? of_group : row);
      factor[r] = factors[own + r * 8];
    }
    if (kRows == 1) factor[1] = factor[0];
    const auto finish = [&](int j, float4 z) {
      store(at.column + j * PieceLine<kWide>::kColumns,
            {z.x * factor[0], z.y * factor[0], z.z * factor[1], z.w * factor[1]});
    };
    if constexpr (kTogether) {
#pragma unroll
      for (int j = 0; j < kLines; ++j) shared.sums[warp][j][lane] = y[j];
      __syncthreads();
      if (warp < kLines) {
        float4 z = {};
#pragma unroll
        for (int w = 0; w < kMergeWarps; ++w) {
          const float4 its_sum = shared.sums[w][warp][lane];
          z.x += its_sum.x, z.y += its_sum.y, z.z += its_sum.z, z.w += its_sum.w;
        }
        finish(warp, z);
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int j = 0; j < kLines; ++j) finish(j, y[j]);
      __syncwarp();
    }
  }

  int64_t place[kRows];  // among [batch, queries, heads]
  bool has[kRows];
  __device__ __forceinline__ void store(int column, float4 y) const {
    const auto to = [&](auto* out) {
      out += column;
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
  grid_dependency_wait();
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
