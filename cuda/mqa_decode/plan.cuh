// How the mqa_decode kernels divide their work.
//
// Work tiles. A work tile is (request, KV head group, row pass). It covers the request's key tiles
// of 64 keys and as many row tiles (16, 32 or 64 rows of queries times heads) as a CTA group has
// CTAs. Its cost is its number of key tiles plus kWorkTileOverhead.
//
// Work ranges. The work tiles of all requests, end to end, are divided into equal work ranges, one
// per CTA group. All CTAs of a group process the same range, each for another row tile, and so read
// the same keys at the same time. Each CTA adds up the requests' costs itself, from the lengths in
// device memory. That takes microseconds; a kernel launch for it would take longer.
//
// KV splits. The intersection of a work range and a work tile is a KV split. Splits that are not
// whole work tiles leave partial results for the combine kernel. A CTA has at most two of these:
// the end of a work tile that an earlier CTA group began, and the beginning of one that a later CTA
// group finishes. If whole work tiles fit the CTA groups nearly as well, none is split. Otherwise,
// if all work tiles are nearly equally long, each gets CTA groups of its own.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/types.h"
#include "mqa_decode/mqa_decode.h"
#include "mqa_decode/tuning.h"

namespace jax_dsa::mqa_decode {

inline constexpr int kWorkTileOverhead = 2;  // in key tiles: the wait for a work tile's first keys,
                                             // and its end
inline constexpr int kMaxCtaGroupSize = 8;
inline constexpr int kPlanBarrier = 6;  // a named barrier that no other code uses
inline constexpr int kMaxCtaGroups = 2 * kMaxSms;

// Returns a / b for a >= 0 and b > 0, where b is usually a power of two. A division takes about a
// hundred cycles, and the start of a kernel would have many of them.
__device__ __forceinline__ int quotient(int a, int b) {
  return (b & (b - 1)) == 0 ? a >> (__ffs(b) - 1) : a / b;
}

struct TunedParams : MqaDecodeParams {
  Tuning tuning;
};

// The parameters, and what the launcher derives from them.
struct Decode : TunedParams {
  int per_group;  // heads per KV head group
  int rows;       // rows of a KV head group: its heads for each query
  int cta_group_size, row_passes, cta_groups;
  int combine_cost;              // cost of splitting all work tiles, in key tiles
  int work_tiles_per_cta_group;  // work tiles per CTA group if none is split

  Decode(const TunedParams& p, int tile_rows, int ctas) : TunedParams(p) {
    per_group = heads / groups;
    rows = static_cast<int>(p.queries) * per_group;
    const int tiles = ceil_div(rows, tile_rows);
    const auto work_tiles_at_once = [&](int n) { return double(ctas / n) / ceil_div(tiles, n); };
    double best = 0;
    cta_group_size = 1;
    for (int n = 1; n <= std::min(std::min(tiles, kMaxCtaGroupSize), ctas); ++n) {
      // The keys of a larger CTA group are read less often.
      if (work_tiles_at_once(n) >= 0.95 * best) cta_group_size = n;
      best = std::max(best, work_tiles_at_once(n));
    }
    row_passes = ceil_div(tiles, cta_group_size);
    cta_groups = ctas / cta_group_size;
    const int64_t work_tiles = batch * groups * row_passes;
    work_tiles_per_cta_group = static_cast<int>(ceil_div(work_tiles, int64_t{cta_groups}));
    // The combine kernel processes a few tiles of 64 rows at a time.
    const int64_t tiles_to_split = std::min<int64_t>(work_tiles, cta_groups);
    combine_cost = tuning.combine_cost *
                   (1 + static_cast<int>(tiles_to_split) * cta_group_size * (tile_rows / 64) / 64);
  }

  __device__ int cta_group() const { return quotient(blockIdx.x, cta_group_size); }
  __device__ int cta_rank() const { return blockIdx.x - cta_group() * cta_group_size; }
  // Returns the position of a row of a KV head group in [batch, queries, heads].
  __device__ int row_index(int batch, int group, int row) const {
    const int query = quotient(row, per_group), head = group * per_group + row - query * per_group;
    return (batch * static_cast<int>(queries) + query) * heads + head;
  }
};

// The range [low, high) of keys that at least one of a request's queries sees, and the range that
// all of them see.
struct VisibleKeys {
  int low = INT_MAX, high = 0;
  int common_low = 0, common_high = INT_MAX;

  __device__ void add(const Decode& p, int64_t token) {
    const int start = max(__ldg(p.starts + token), 0);
    const int end = max(min(__ldg(p.ends + token), static_cast<int>(p.keys)), 0);
    if (start < end) {
      low = min(low, start);
      high = max(high, end);
    }
    common_low = max(common_low, start);
    common_high = min(common_high, end);
  }
  __device__ int first_key() const { return low < high ? low / kTile * kTile : 0; }
  __device__ int tiles() const { return low < high ? ceil_div(high - first_key(), kTile) : 0; }
  // Whether all queries see all `keys` keys from `key` on.
  __device__ bool seen_by_all(int key, int keys = kTile) const {
    return common_low <= key && key <= common_high - keys;
  }
};

// Returns the visible keys of a request. The second function is called by a whole warp, and faster.
__device__ inline VisibleKeys visible_keys_by_thread(const Decode& p, int64_t batch) {
  VisibleKeys x;
#pragma unroll 1
  for (int t = 0; t < p.queries; ++t) x.add(p, batch * p.queries + t);
  return x;
}
__device__ inline VisibleKeys visible_keys_by_warp(const Decode& p, int64_t batch) {
  VisibleKeys x;
#pragma unroll 1
  for (int t = threadIdx.x % 32; t < p.queries; t += 32) x.add(p, batch * p.queries + t);
  x.low = __reduce_min_sync(~0u, x.low);
  x.high = __reduce_max_sync(~0u, x.high);
  x.common_low = __reduce_max_sync(~0u, x.common_low);
  x.common_high = __reduce_min_sync(~0u, x.common_high);
  return x;
}

// Returns the cost of a work tile of this request.
__device__ inline int work_tile_cost(const VisibleKeys& x) { return kWorkTileOverhead + x.tiles(); }

// A position in the sequence of all work.
struct WorkPosition {
  int batch, tile;  // the request, and the work tile's number within the request
  int offset;       // cost of the work tile up to the position
};

// The work range of a CTA group.
struct WorkRange {
  WorkPosition first;
  VisibleKeys visible;  // by the queries of the first work tile
  int cost;
  int uniform_cost;  // cost of every work tile, in key tiles, if all are treated as equally long;
                     // otherwise 0
  int splits;        // known after `find_last_tile`
  uint64_t ready;    // mbarrier; completes when everything except `splits` is written
};

// Must be called before the first __syncthreads.
__device__ inline void initialise(WorkRange& range) {
  if (threadIdx.x == 0) mbarrier_init(&range.ready, 1);
}
__device__ inline void wait_for(WorkRange& range) { mbarrier_wait(&range.ready, 0); }

// Computes this CTA's work range. The MMA warpgroups do it with all of their kThreads threads, each
// of which knows the cost of some requests. The producer waits for the range and starts.
// `find_last_tile` then tells the MMA warpgroups how many splits there are.
template <int kThreads>
struct WorkRangeFinder {
  struct Scratch {
    int sums[kThreads / 32], tops[kThreads / 32];
  };
  const Decode& p;
  WorkRange& range;
  int per_request;
  int first, last;      // this thread's requests
  int own_cost = 0;     // of this thread's requests
  int cost_before = 0;  // of all requests before them
  int max_cost = 0;     // of a work tile
  int range_cost;       // of a work range; the first `longer_ranges` ranges have one more
  int longer_ranges;
  int begin, end;    // this CTA's range within the cost of all work
  int uniform_cost;  // see WorkRange

  __device__ WorkRangeFinder(const Decode& p, Scratch& scratch, WorkRange& range)
      : p(p), range(range), per_request(p.groups * p.row_passes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int batch = static_cast<int>(p.batch), chunk = ceil_div(batch, kThreads);
    first = min(chunk * static_cast<int>(threadIdx.x), batch);
    last = min(first + chunk, batch);
    for (int b = first; b < last; ++b) {
      const int tile_cost = work_tile_cost(visible_keys_by_thread(p, b));
      own_cost += tile_cost * per_request;
      max_cost = max(max_cost, tile_cost);
    }
    cost_before = inclusive_scan(own_cost);
    max_cost = __reduce_max_sync(~0u, max_cost);
    if (lane == 31) scratch.sums[warp] = cost_before, scratch.tops[warp] = max_cost;
    named_barrier_sync<kThreads>(kPlanBarrier);
    cost_before -= own_cost;
    int total = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) cost_before += scratch.sums[i];
      total += scratch.sums[i];
      max_cost = max(max_cost, scratch.tops[i]);
    }
    int busy = p.cta_groups;
    if (total < p.cta_groups * p.tuning.min_range_tiles) {
      busy = max(quotient(total, p.tuning.min_range_tiles), 1);
    }
    range_cost = quotient(total, busy), longer_ranges = total - range_cost * busy;
    const int work_tiles = batch * per_request, tiles = max(max_cost - kWorkTileOverhead, 1);
    uniform_cost = 0;
    if (int64_t{p.work_tiles_per_cta_group} * max_cost <= range_cost + p.combine_cost) {
      range_cost = p.work_tiles_per_cta_group * tiles;
      uniform_cost = tiles;
    } else if (busy >= 2 * work_tiles) {
      const int splits_per_tile = quotient(busy, work_tiles);
      const int split_cost = ceil_div(tiles, splits_per_tile);
      if (split_cost <= range_cost + 1) {
        range_cost = split_cost, uniform_cost = split_cost * splits_per_tile;
      }
    }
    if (uniform_cost > 0) {
      own_cost = (last - first) * per_request * uniform_cost;
      cost_before = first * per_request * uniform_cost;
      total = work_tiles * uniform_cost;
      longer_ranges = 0;
    }
    const int cta_group = p.cta_group();
    begin = min(range_cost * cta_group + min(cta_group, longer_ranges), total);
    end = min(begin + range_cost + (cta_group < longer_ranges ? 1 : 0), total);
    if (threadIdx.x == 0) {
      range.cost = end - begin;
      range.uniform_cost = uniform_cost;
      range.splits = 0;
      if (p.cta_rank() == 0) p.split_tiles[cta_group] = make_int2(0, 0);
    }
    if (has(begin)) {
      const WorkTile work_tile = find(begin);
      range.first = {work_tile.batch, work_tile.tile, begin - work_tile.begin};
      range.visible = work_tile.visible;
    }
    named_barrier_sync<kThreads>(kPlanBarrier);
    if (threadIdx.x == 0) mbarrier_arrive(&range.ready);
  }

  // Counts the splits of the range. If the range begins its last work tile without finishing it,
  // records that work tile and its number of splits for the combine kernel.
  __device__ void find_last_tile() {
    if (has(end - 1)) {
      const WorkTile work_tile = find(end - 1);
      range.splits = (work_tile.batch - range.first.batch) * per_request + work_tile.tile -
                     range.first.tile + 1;
      const int tile_end = work_tile.begin + work_tile.tile_cost;
      if (p.cta_rank() == 0 && work_tile.begin >= begin && tile_end > end) {
        const int longer_cost = longer_ranges * (range_cost + 1), rest = tile_end - 1 - longer_cost;
        const int last_group =
            rest < 0 ? (tile_end - 1) / (range_cost + 1) : longer_ranges + rest / range_cost;
        p.split_tiles[p.cta_group()] = make_int2(work_tile.batch * per_request + work_tile.tile,
                                                 last_group - p.cta_group() + 1);
      }
    }
    named_barrier_sync<kThreads>(kPlanBarrier);
  }

 private:
  struct WorkTile {
    VisibleKeys visible;
    int batch, tile, begin, tile_cost;
  };
  __device__ bool has(int at) const {
    return begin < end && at >= cost_before && at < cost_before + own_cost;
  }
  __device__ WorkTile find(int at) const {
    for (int b = first, position = cost_before;; ++b) {
      const VisibleKeys visible = visible_keys_by_thread(p, b);
      const int tile_cost = uniform_cost > 0 ? uniform_cost : work_tile_cost(visible);
      if (at < position + tile_cost * per_request) {
        const int tile = per_request == 1 ? 0 : quotient(at - position, tile_cost);
        return {visible, b, tile, position + tile * tile_cost, tile_cost};
      }
      position += tile_cost * per_request;
    }
  }
};

// What consumers must know about a KV split.
struct KvSplit {
  int batch, group, row;  // `row` is the first of its row tile
  int partial_index;      // index of its partial results; -1 if its results are final
  bool has_tiles;
};
// Partial outputs are lines of 128 floats. If kWide, a line has the accumulator layout: lines are
// ordered by column half, warp and column group (8 columns), and a lane has two floats of a row and
// two of the row 8 below. Otherwise rows follow one another, and a lane has four neighboring floats
// of one row. The constructor computes where a lane's four floats of a line belong.
template <bool kWide>
struct PartialLine {
  static constexpr int kColumns = kWide ? 8 : 128;  // from one line to the next line of the same
                                                    // rows
  int row, column;

  __device__ PartialLine(int line, int value_dim) {
    const int lane = threadIdx.x % 32;
    if constexpr (kWide) {
      row = line / 32 % 4 * 16 + lane / 4;
      column = line / 128 * 256 + line % 32 * 8 + lane % 4 * 2;
    } else {
      row = quotient(line * 128 + lane * 4, value_dim);
      column = line * 128 + lane * 4 - row * value_dim;
    }
  }
};
// Splits that are kept. Results of a split are written after the keys of the next splits have
// arrived.
inline constexpr int kSplitsKept = 4;

// Iterates over the KV splits of a CTA's work range. Used by a whole warp.
struct SplitIterator {
  const Decode& p;
  const WorkRange& range;
  int tile_rows;
  int index = -1;   // of the split
  int batch, tile;  // the split's request, and the work tile's number within the request
  int cost_left;
  VisibleKeys visible;
  KvSplit split;
  int first_key, tiles;  // the split's first key and number of key tiles

  __device__ SplitIterator(const Decode& p, const WorkRange& range, int tile_rows)
      : p(p),
        range(range),
        tile_rows(tile_rows),
        batch(range.first.batch),
        tile(range.first.tile),
        cost_left(range.cost),
        visible(range.visible) {}

  __device__ bool next() {
    if (cost_left <= 0) return false;
    if (++index > 0 && ++tile == p.groups * p.row_passes) {
      tile = 0;
      visible = visible_keys_by_warp(p, ++batch);
    }
    const int group = quotient(tile, p.row_passes);
    const int row = ((tile - group * p.row_passes) * p.cta_group_size + p.cta_rank()) * tile_rows;
    const int begin = index == 0 ? range.first.offset : 0;
    const int all = range.uniform_cost > 0 ? range.uniform_cost : work_tile_cost(visible);
    const int stop = cost_left < all - begin ? begin + cost_left : all;
    cost_left -= stop - begin;
    const bool final = begin == 0 && stop == all;
    const int overhead = range.uniform_cost > 0 ? 0 : kWorkTileOverhead;
    const int from = max(begin - overhead, 0);
    first_key = visible.first_key() + from * kTile;
    tiles = row < p.rows ? max(min(stop - overhead, visible.tiles()) - from, 0) : 0;
    split = {batch, group, row, final ? -1 : static_cast<int>(blockIdx.x) * 2 + (begin == 0),
             tiles > 0};
    return true;
  }
};

// Launches the kernel that combines the splits of work tiles of `tile_rows` rows (combine.cuh). It
// may start under programmatic dependent launch.
cudaError_t launch_combine(const Decode& p, int tile_rows, bool wide, cudaStream_t stream);

}  // namespace jax_dsa::mqa_decode
