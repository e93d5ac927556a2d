// The work tiles of the teacher's kernels for the multi-head form (teacher_heads.cuh).
#pragma once

#include <climits>
#include <cstdint>

#include "common/types.h"
#include "losses/losses.h"
#include "losses/ranges.cuh"

namespace jax_dsa::teacher_heads {

inline constexpr int kQueries = 128;  // per work tile

// Which of the two kernels runs.
enum class Pass { kLogSumExp, kSums };

// Returns the number of work tiles with key tiles of kKeys keys.
template <int kKeys>
__host__ __device__ inline int64_t work_tile_count(const TeacherParams& p, Pass pass) {
  const int64_t heads_or_tiles =
      pass == Pass::kLogSumExp ? p.heads : ceil_div(p.keys, int64_t{kKeys});
  return p.batch * ceil_div(p.queries, int64_t{kQueries}) * heads_or_tiles;
}

// Iterates over a CTA's work tiles. `tiles` are the key tiles that any of the queries sees, in the
// second kernel one tile.
template <Pass kPass, int kKeys>
struct WorkTiles {
  static_assert(kKeys % kTile == 0);
  int batch, query, head;  // first query; head in the first kernel, 0 in the second
  Tiles tiles;

  __device__ bool next(const TeacherParams& p) {
    const int work_tiles = static_cast<int>(work_tile_count<kKeys>(p, kPass));
    const int per_batch = static_cast<int>(ceil_div(p.queries, int64_t{kQueries}));
    const int heads_or_tiles = work_tiles / per_batch / static_cast<int>(p.batch);
    for (; index < work_tiles; index += gridDim.x) {
      const int head_or_tile = index % heads_or_tiles, query_tile = index / heads_or_tiles;
      batch = query_tile / per_batch;
      query = (per_batch - 1 - query_tile % per_batch) * kQueries;  // The last queries come first.
      int first = INT_MAX, last = 0;
      for (int i = 0; i < kQueries / 32; ++i) {
        const Tiles some = tiles_seen(p, batch, query + i * 32, 32);
        if (some.first == some.last) continue;
        first = min(first, some.first / (kKeys / kTile));
        last = max(last, ceil_div(some.last, kKeys / kTile));
      }
      if (kPass == Pass::kSums)
        first = max(first, head_or_tile), last = min(last, head_or_tile + 1);
      if (first >= last) continue;
      head = kPass == Pass::kSums ? 0 : head_or_tile;
      tiles = {first, last, 0, 0};
      index += gridDim.x;
      return true;
    }
    return false;
  }

 private:
  int index = blockIdx.x;
};

}  // namespace jax_dsa::teacher_heads
