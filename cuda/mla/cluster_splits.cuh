// KV splits whose results the CTAs of a cluster combine, for the kernels with the MMA warpgroup of
// few_heads.cuh.
//
// Each CTA leaves the result of its split in its own shared memory, in place of the keys. Once all
// CTAs have done so, each adds up some of the rows of all of them. A launch is thus one kernel that
// writes no partial results to global memory.
#pragma once

#include "common/cluster.cuh"
#include "common/combine_splits.cuh"
#include "common/limits.h"
#include "mla/few_heads.cuh"

namespace jax_dsa::mla {

// Returns a row of the CTA's partial result: the outputs, relative to the row's maximum, then the
// maximum and the sum. The padding puts what a warp stores at a time into different banks.
template <typename Tr, typename Shared>
__device__ __forceinline__ float* partial_row(Shared& shared, int row) {
  constexpr int kLength = Tr::kE + 4;
  static_assert(Tr::kN * kLength * sizeof(float) <= sizeof(shared.ring));
  return reinterpret_cast<float*>(shared.ring) + row * kLength;
}

// Stores the CTA's partial result.
template <typename Tr, typename Shared>
__device__ __forceinline__ void store_cluster_split(Shared& shared,
                                                    const float (&o)[Tr::kValueBlocks][Tr::kN / 2],
                                                    const HeadColumns<Tr::kN>& columns) {
  const int dim = thread_index() / 32 % 4 * 16 + thread_index() % 32 / 4;
#pragma unroll
  for (int c = 0; c < columns.kHeadsPerThread; ++c) {
    float* const to = partial_row<Tr>(shared, columns.head(c));
#pragma unroll
    for (int m = 0; m < Tr::kValueBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < Tr::kN / 2; ++i) {
        if (columns.local_head(i) == c) to[m * 64 + dim + i / 2 % 2 * 8] = o[m][i];
      }
    }
    if (threadIdx.x < 4) {
      *reinterpret_cast<float2*>(to + Tr::kE) = make_float2(columns.running_max[c], columns.sum[c]);
    }
  }
}

// Where a combined row belongs.
struct CombinedPlace {
  const float* sink;  // null: none
  int64_t row;        // of the results
};

// Combines the partial results of the cluster's `splits` CTAs in ascending order, for every
// `splits`-th of the first `rows` rows. `place_of(row)` returns a CombinedPlace, and
// `store(i, y)` stores the outputs from the i-th on, an even number of them. The MMA warpgroup
// calls this between two barriers of the cluster.
template <typename Tr, typename Params, typename Shared, typename PlaceOf, typename Store>
__device__ __forceinline__ void combine_cluster_splits(const Params& p, Shared& shared, int splits,
                                                       int rows, const PlaceOf& place_of,
                                                       const Store& store) {
  // A lane has four columns at a time, or two where fewer warps would take part otherwise.
  constexpr int kE = Tr::kE, kColumns = kE > 128 ? 4 : 2, kPieces = ceil_div(kE, 32 * kColumns);
  struct alignas(kColumns * sizeof(float)) Columns {
    float x[kColumns];
  };
  const int lane = threadIdx.x % 32, rank = cluster_rank();
#pragma unroll 1
  for (int i = threadIdx.x / 32; rank + i / kPieces * splits < rows; i += 4) {
    const int row = rank + i / kPieces * splits, column = (i % kPieces * 32 + lane) * kColumns;
    const bool has = kE % (32 * kColumns) == 0 || column < kE;
    float* const own = partial_row<Tr>(shared, row);
    Columns parts[kMaxClusterSize];
#pragma unroll
    for (int split = 0; split < kMaxClusterSize; ++split) {
      parts[split] = {};
      if (split < splits && has) {
        parts[split] = *reinterpret_cast<const Columns*>(cluster_peer(own + column, split));
      }
    }
    float2 of = make_float2(-INFINITY, 0.f);  // the maximum and the sum of split `lane`
    if (lane < splits) of = *reinterpret_cast<const float2*>(cluster_peer(own + kE, lane));
    const float max = max_over_lanes(of.x), weight = split_weight(of.x, 1.f, max);
    const float total = sum_over_lanes(of.y * weight);
    Columns y = {};
#pragma unroll
    for (int split = 0; split < kMaxClusterSize; ++split) {
      const float w = __shfl_sync(~0u, weight, split);
      if (split >= splits) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) y.x[c] += w * parts[split].x[c];
    }
    const CombinedPlace place = place_of(row);
    // If all scores are -inf the output is zero, or NaN if it has an infinite value.
    CombinedRow combined(max, total);
    if (combined.empty) {
      combined.factor = 1.f;
    } else if (place.sink) {
      combined.apply_sink(*place.sink);
    }
#pragma unroll
    for (float& column_sum : y.x) column_sum *= combined.factor;
    if (has) store(place.row * kE + column, y.x);
    if (column == 0) {
      p.max_logit[place.row] = max_with_nan(max, total);
      p.log_sum[place.row] = log_of_sum(total);
    }
  }
}

}  // namespace jax_dsa::mla
