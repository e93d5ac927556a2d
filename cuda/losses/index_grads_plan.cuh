// The work tiles and the left operand of the products in index_grads.cuh.
#pragma once

#include <climits>
#include <cstdint>

#include "common/ptx.cuh"
#include "common/types.h"
#include "losses/losses.h"
#include "losses/ranges.cuh"

namespace jax_dsa::index_grads {

inline constexpr int kRows = 64;  // rows of half a work tile; heads are padded to this number
static_assert(kIndexGradsHeads == kRows);
static_assert(kIndexGradsKeys == 2 * kRows && kIndexGradsSegment <= 128);

// Which gradient a kernel computes: dq with the heads of queries as rows, or f with keys as rows.
enum class Gradient { kQueries, kKeys };

// ---- work tiles --------------------------------------------------------------------------------

// Iterates over the work tiles of dq. `tiles` are key tiles.
template <Gradient kGradient>
struct WorkTiles : QueryWorkTiles {
  __device__ bool next(const IndexGradsParams& p) { return QueryWorkTiles::next(p, 2); }
};

// Iterates over the work tiles of f. `tiles` are queries.
template <>
struct WorkTiles<Gradient::kKeys> {
  int batch, key;  // batch entry and first key of the current work tile
  int segment;
  Tiles tiles;

  __device__ bool next(const IndexGradsParams& p) {
    const int key_tiles = static_cast<int>(ceil_div(p.keys, int64_t{kIndexGradsKeys}));
    const int segments = static_cast<int>(ceil_div(p.queries, int64_t{kIndexGradsSegment}));
    const int entries = static_cast<int>(p.batch), ctas = gridDim.x;
    const int work_tiles = segments * entries * key_tiles;
    while (round * ctas < work_tiles) {
      const int work_tile = round * ctas + (round % 2 ? ctas - 1 - blockIdx.x : blockIdx.x);
      ++round;
      if (work_tile >= work_tiles) continue;
      const int key_tile = work_tile % key_tiles;
      batch = work_tile / key_tiles % entries;
      segment = work_tile / key_tiles / entries;
      key = key_tile * kIndexGradsKeys;
      tiles = queries_that_see(p);
      if (threadIdx.x == 0) {
        p.partial_used[(int64_t{segment} * entries + batch) * key_tiles + key_tile] =
            tiles.first < tiles.last;
      }
      if (tiles.first < tiles.last) return true;
    }
    return false;
  }

 private:
  int round = 0;

  // Returns the range from the first query of the segment that sees any of the keys to the last.
  __device__ Tiles queries_that_see(const IndexGradsParams& p) const {
    int first = INT_MAX, last = 0;
    for (int i = threadIdx.x % 32; i < kIndexGradsSegment; i += 32) {
      const int query = segment * kIndexGradsSegment + i;
      const Range seen = range_of(p, batch, query);
      if (seen.low < key + kIndexGradsKeys && seen.high > key) {
        first = min(first, query);
        last = max(last, query + 1);
      }
    }
    first = __reduce_min_sync(~0u, first);
    last = __reduce_max_sync(~0u, last);
    return first < last ? Tiles{first, last, 0, 0} : Tiles{0, 0, 0, 0};
  }
};

// ---- left operand -------------------------------------------------------------------------------

// The factors that thread `i` of the warpgroup of copies writes for a tile.
struct Factors {
  float column_factor, row_factor;
};

__device__ __forceinline__ Factors factors(const IndexGradsParams& p,
                                           const WorkTiles<Gradient::kQueries>& work_tile, int tile,
                                           int i) {
  const int query = work_tile.query + i / kTile, key = tile * kTile + i % kTile;
  if (!range_of(p, work_tile.batch, query).has(key)) return {0.f, 0.f};
  const float g = __ldg(p.grad + (work_tile.batch * p.queries + query) * p.keys + key);
  return {p.k_scale ? g * __ldg(p.k_scale + work_tile.batch * p.keys + key) : g, 0.f};
}

__device__ __forceinline__ Factors factors(const IndexGradsParams& p,
                                           const WorkTiles<Gradient::kKeys>& work_tile, int query,
                                           int i) {
  const int64_t token = work_tile.batch * p.queries + query;
  const bool sees = range_of(p, work_tile.batch, query).has(work_tile.key + i);
  return {i < p.heads ? __ldg(p.weights + token * p.heads + i) : 0.f,
          sees ? __ldg(p.grad + token * p.keys + work_tile.key + i) : 0.f};
}

// How scores are masked: all below `floor` count as this, and the bits of `keep` are always set.
struct Relu {
  float floor;
  uint32_t keep;

  __device__ explicit Relu(bool relu) : floor(relu ? 0.f : -INFINITY), keep(relu ? 0 : ~0u) {}
};

// Computes h from scores of 16 rows and kScores * 2 columns, and adds to dw. The thread's scores
// have the layout of accumulators, and h has that of a left operand. `columns` are the factors of
// the thread's first column and those after it.
template <Gradient kGradient, int kScores>
__device__ __forceinline__ void make_h(const float (&x)[kScores], const float* columns,
                                       const float (&row_factor)[2], Relu relu, float (&dw)[2],
                                       uint32_t (&h)[kScores / 8][4]) {
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 f = *reinterpret_cast<const float2*>(columns + 8 * i);
    const uint32_t rounded = pack_bf16(f.x, f.y);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float a = fmaxf(x[4 * i + 2 * r], relu.floor);
      const float b = fmaxf(x[4 * i + 2 * r + 1], relu.floor);
      if (kGradient == Gradient::kQueries) dw[r] = fmaf(f.y, b, fmaf(f.x, a, dw[r]));
      const uint32_t relu_mask = positive_bf16(pack_bf16(a, b)) | relu.keep;
      const uint32_t product = kGradient == Gradient::kQueries
                                   ? rounded
                                   : pack_bf16(f.x * row_factor[r], f.y * row_factor[r]);
      h[i / 2][i % 2 * 2 + r] = product & relu_mask;
    }
  }
}

}  // namespace jax_dsa::index_grads
