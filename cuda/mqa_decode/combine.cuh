// Combines the results of work tiles that are divided into KV splits, as common/combine_splits.cuh
// says.
//
// The splits of a work tile belong to consecutive CTA groups. A split's outputs are lines of 128
// floats (PartialLine), of which each lane has four. A warp combines a few lines at a time. Where
// there are many splits, each warp of a CTA adds some of the splits of the same lines. The order of
// additions depends only on the number of splits, so results are the same on every run.
#pragma once

#include <cuda_bf16.h>

#include "common/combine_splits.cuh"
#include "common/ptx.cuh"
#include "mqa_decode/splits.cuh"

namespace jax_dsa::mqa_decode {

inline constexpr int kCombineThreads = 256;
inline constexpr int kCombineWarps = kCombineThreads / 32;
inline constexpr int kCombineCtasPerSm = 2;
inline constexpr int kWarpSplits = 16;  // the most splits that one warp combines
inline constexpr int kFewSplits = 3;    // the most splits for which a warp takes four lines
inline constexpr int kMaxLines = 2;     // the most lines of a warp if a CTA shares them
inline constexpr int kCtaGroupsPerLane = (kMaxCtaGroups + 31) / 32;

struct SplitTile {
  int cta_group, work_tile, splits;
};
struct CombineShared {
  int count, splits;  // work tiles that may be split, and the most splits that any may have
  SplitTile split_tiles[kMaxCtaGroups];
  float weights[kMaxCtaGroups][16];  // by split and row of a line; without kByCta each warp has
                                     // kWarpSplits splits of its own
  float maxima[kMaxCtaGroups][16];   // as `weights`
  float factors[kCombineWarps][16];
  float4 sums[kCombineWarps][kMaxLines][32];
};

// Lists the work tiles that are divided into splits. Called by one warp.
__device__ inline void find_split_tiles(const Decode& p, CombineShared& shared) {
  const int lane = threadIdx.x % 32;
  int2 found[kCtaGroupsPerLane];
#pragma unroll
  for (int i = 0; i < kCtaGroupsPerLane; ++i) {
    const int cta_group = i * 32 + lane;
    found[i] = cta_group < p.cta_groups ? p.split_tiles[cta_group] : make_int2(0, 0);
  }
  int count = 0, splits = 0;
#pragma unroll
  for (int i = 0; i < kCtaGroupsPerLane; ++i) {
    splits = max(splits, found[i].y);
    const uint32_t has = __ballot_sync(~0u, found[i].y > 0);
    if (found[i].y > 0) {
      const int preceding = __popc(has & ((1u << lane) - 1));
      shared.split_tiles[count + preceding] = {i * 32 + lane, found[i].x, found[i].y};
    }
    count += __popc(has);
  }
  splits = __reduce_max_sync(~0u, splits);
  if (lane == 0) shared.count = count, shared.splits = splits;
}

// The same for static splits, which follow from the lengths. Called by all threads, also while the
// splits are being computed.
__device__ inline void list_static_splits(const Decode& p, CombineShared& shared) {
  for (int i = threadIdx.x; i < p.work_tiles; i += kCombineThreads) {
    const int tiles = visible_keys_by_thread(p, i / p.per_request).tiles();
    shared.split_tiles[i] = {i * p.static_splits, i, ceil_div(tiles, p.static_split_tiles(tiles))};
  }
  if (threadIdx.x == 0) shared.count = p.work_tiles, shared.splits = p.static_splits;
}

// Combines kLines lines of a split work tile, the first of which is `line` of a CTA rank's results.
// The whole CTA does so if kByCta, otherwise one warp.
template <bool kWide, int kLines, bool kByCta>
struct CombineLines {
  static constexpr int kRows = kWide ? 2 : 1;  // rows that a lane has
  static constexpr int kRowsOfLine = kWide ? 16 : 2;
  // kLanes lanes compute the weights of a row's splits. Each has the maxima and sums of kRounds
  // splits in flight.
  static constexpr int kLanes = kByCta ? (kWide ? 16 : 32) : 32 / kRowsOfLine;
  static constexpr int kRounds = kByCta ? 4 : kWarpSplits / kLanes;
  // splits whose loads are in flight at a time
  static constexpr int kBatch = kLines == 4 ? kFewSplits : 16 / kLines;
  const Decode& p;
  CombineShared& shared;
  const SplitTile& split_tile;
  const int cta_rank, tile_rows, line, first_row, first_partial;
  const int64_t offset;  // in a partial result

  __device__ __forceinline__ CombineLines(const Decode& p, CombineShared& shared,
                                          const SplitTile& split_tile, int cta_rank, int tile_rows,
                                          int line)
      : p(p),
        shared(shared),
        split_tile(split_tile),
        cta_rank(cta_rank),
        tile_rows(tile_rows),
        line(line),
        first_row(kWide ? line / 32 % 4 * 16 : quotient(line * 128, p.value_dim)),
        first_partial((split_tile.cta_group * p.cta_group_size + cta_rank) * 2),
        offset(int64_t{line} * 128 + threadIdx.x % 32 * 4) {}

  // The first CTA group begins the work tile at the end of its range, so its split is in the CTA's
  // second partial result. Later CTA groups have theirs in the first.
  __device__ int partial_index(int split) const {
    return first_partial + 2 * p.cta_group_size * split + (split == 0);
  }

  float4 x[kBatch][kLines];
  __device__ __forceinline__ void load(int first, int last) {
    const int64_t size = tile_rows * p.value_dim;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float* from = p.partial + partial_index(first + i) * size + offset;
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        if (first + i < last) x[i][j] = *reinterpret_cast<const float4*>(from + j * 128);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = kByCta ? split_tile.splits * warp / kCombineWarps : 0;
    const int last = kByCta ? split_tile.splits * (warp + 1) / kCombineWarps : split_tile.splits;
    float* weights = shared.weights[kByCta ? 0 : warp * kWarpSplits];
    float* maxima = shared.maxima[kByCta ? 0 : warp * kWarpSplits];
    float* factors = shared.factors[kByCta ? 0 : warp];

    load(first, last);  // issue the loads before anything waits

    // The lanes of a row compute the weights of its splits.
    const int row_of_line = lane / kLanes + (kByCta ? warp * (32 / kLanes) : 0),
              first_split = lane % kLanes;
    const bool weighs = row_of_line < kRowsOfLine && (kWide || row_of_line * p.value_dim < 128);
    float max = -INFINITY, total = 0.f;
#pragma unroll 1
    for (int base = 0; base < split_tile.splits; base += kRounds * kLanes) {
      float2 found[kRounds];
#pragma unroll
      for (int k = 0; k < kRounds; ++k) {
        const int split = base + k * kLanes + first_split;
        found[k] = make_float2(-INFINITY, 0.f);
        if (weighs && split < split_tile.splits) {
          found[k] =
              p.partial_rows[int64_t{partial_index(split)} * tile_rows + first_row + row_of_line];
        }
      }
#pragma unroll
      for (int k = 0; k < kRounds; ++k) {
        const int split = base + k * kLanes + first_split;
        max = fmaxf(max, found[k].x);
        if (weighs && split < split_tile.splits) {
          maxima[split * kRowsOfLine + row_of_line] = found[k].x;
          weights[split * kRowsOfLine + row_of_line] = found[k].y;
        }
      }
    }
    const int batch = split_tile.work_tile / p.per_request;
    const int rest = split_tile.work_tile - batch * p.per_request, group = rest / p.row_passes;
    const int row = ((rest - group * p.row_passes) * p.cta_group_size + cta_rank) * tile_rows;
    max = max_over_lanes<kLanes>(max);
    if (weighs) {
#pragma unroll 4
      for (int split = first_split; split < split_tile.splits; split += kLanes) {
        const int at = split * kRowsOfLine + row_of_line;
        float& weight = weights[at];
        weight = split_weight(maxima[at], weight, max);
        total += weight;
      }
    }
    total = sum_over_lanes<kLanes>(total);
    if (weighs && first_split == 0) {
      const int group_row = row + first_row + row_of_line;
      const bool has = group_row < p.rows;
      CombinedRow combined(max, total);
      if (p.sinks && !combined.empty && has) {
        const int head = group * p.per_group + group_row % p.per_group;
        combined.apply_sink(p.sinks[batch * p.sinks_stride + head]);
      }
      factors[row_of_line] = combined.factor;
      // The warp that has the row's first column writes max_logit and log_sum.
      const int column = kWide ? line / 128 * 256 + line % 32
                               : line * 128 - (first_row + row_of_line) * p.value_dim;
      if (has && column <= 0) {
        const int row_index = p.row_index(batch, group, group_row);
        p.max_logit[row_index] = max_with_nan(max, total);
        p.log_sum[row_index] = log_of_sum(total);
      }
    }
    if constexpr (kByCta) {
      __syncthreads();
    } else {
      __syncwarp();
    }

    const PartialLine<kWide> at(line, p.value_dim);
    const int own_row = at.row - first_row;
    float4 y[kLines] = {};
#pragma unroll 1
    for (int split = first; split < last; split += kBatch) {
      if (split > first) load(split, last);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (split + i >= last) break;
        float weight[2];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          weight[r] = weights[(split + i) * kRowsOfLine + own_row + r * 8];
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
      const int group_row = row + at.row + r * 8;
      has[r] = group_row < p.rows;
      row_index[r] = p.row_index(batch, group, has[r] ? group_row : row);
      factor[r] = factors[own_row + r * 8];
    }
    if (kRows == 1) factor[1] = factor[0];
    const auto finish = [&](int j, float4 z) {
      store(at.column + j * PartialLine<kWide>::kColumns,
            {z.x * factor[0], z.y * factor[0], z.z * factor[1], z.w * factor[1]});
    };
    if constexpr (kByCta) {
#pragma unroll
      for (int j = 0; j < kLines; ++j) shared.sums[warp][j][lane] = y[j];
      __syncthreads();
      if (warp < kLines) {
        float4 z = {};
#pragma unroll
        for (int w = 0; w < kCombineWarps; ++w) {
          const float4 warp_sum = shared.sums[w][warp][lane];
          z.x += warp_sum.x, z.y += warp_sum.y, z.z += warp_sum.z, z.w += warp_sum.w;
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

  int64_t row_index[kRows];  // position in [batch, queries, heads]
  bool has[kRows];
  __device__ __forceinline__ void store(int column, float4 y) const {
    const auto to = [&](auto* out) {
      out += column;
      constexpr int kSecond = kRows - 1, kNext = kWide ? 0 : 2;
      store_pair(out + row_index[0] * p.value_dim, y.x, y.y, has[0]);
      store_pair(out + row_index[kSecond] * p.value_dim + kNext, y.z, y.w, has[kSecond]);
    };
    if (p.out_float) {
      to(static_cast<float*>(p.out));
    } else {
      to(static_cast<__nv_bfloat16*>(p.out));
    }
  }
};

// Returns how many jobs of kLines lines the work tiles have that may be split.
template <int kLines>
__host__ __device__ constexpr int combine_jobs(const Decode& p, int work_tiles, int tile_rows) {
  return work_tiles * p.cta_group_size * (tile_rows * p.value_dim / (128 * kLines));
}

template <bool kWide, int kLines, bool kByCta>
__device__ void combine_lines(const Decode& p, CombineShared& shared, int tile_rows) {
  const int jobs_per_rank = tile_rows * p.value_dim / (128 * kLines);
  const int jobs = combine_jobs<kLines>(p, shared.count, tile_rows);
  // Warps of a CTA take neighboring lines, which share the maxima of their rows. Few jobs are
  // rather spread over all CTAs.
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool spread = jobs * 2 <= static_cast<int>(gridDim.x) * kCombineWarps;
  const int first = kByCta   ? blockIdx.x
                    : spread ? warp * gridDim.x + blockIdx.x
                             : blockIdx.x * kCombineWarps + warp;
  for (int job = first; job < jobs; job += gridDim.x * (kByCta ? 1 : kCombineWarps)) {
    const int rank_of_all = quotient(job, jobs_per_rank), tile = rank_of_all / p.cta_group_size;
    const int cta_rank = rank_of_all - tile * p.cta_group_size;
    const SplitTile& split_tile = shared.split_tiles[tile];
    if (split_tile.splits < 2) continue;  // its results are final
    CombineLines<kWide, kLines, kByCta>(p, shared, split_tile, cta_rank, tile_rows,
                                        (job - rank_of_all * jobs_per_rank) * kLines)
        .run();
  }
}

template <bool kWide, int kLines>
__global__ void __launch_bounds__(kCombineThreads, kCombineCtasPerSm)
    combine_kernel(const __grid_constant__ Decode p, int tile_rows) {
  auto& shared = dynamic_shared<CombineShared>();
  if (p.static_splits > 0) list_static_splits(p, shared);
  grid_dependency_wait();
  if (p.static_splits == 0 && threadIdx.x < 32) find_split_tiles(p, shared);
  __syncthreads();
  if (kWide && shared.splits <= kFewSplits) {
    combine_lines<kWide, kWide ? 4 : kLines, false>(p, shared, tile_rows);
  } else if (kWide && shared.splits > 16 / kLines && shared.splits <= kWarpSplits &&
             combine_jobs<1>(p, shared.count, tile_rows) <= gridDim.x * kCombineWarps) {
    // Each warp has one job anyway. With one line it loads all splits at a time.
    combine_lines<kWide, kWide ? 1 : kLines, false>(p, shared, tile_rows);
  } else if (shared.splits <= kWarpSplits) {
    combine_lines<kWide, kLines, false>(p, shared, tile_rows);
  } else {
    combine_lines<kWide, kLines, true>(p, shared, tile_rows);
  }
}

}  // namespace jax_dsa::mqa_decode
