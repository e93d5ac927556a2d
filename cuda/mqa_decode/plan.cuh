// How the mqa_decode kernels divide their work.
//
// Work tiles. A work tile is (request, KV head group, row pass). It covers the request's key tiles
// of 64 keys and as many row tiles (16, 32 or 64 rows of queries times heads) as a CTA group has
// CTAs. Its cost is its number of key tiles plus kWorkTileOverhead.
//
// Work ranges. The work tiles of all requests, end to end, are divided into work ranges, one per
// CTA group. All CTAs of a group process the same range, each for another row tile, and so read the
// same keys at the same time. The intersection of a work range and a work tile is a KV split.
// Splits that are not whole work tiles leave partial results for the combine kernel. A CTA has at
// most two of these: the end of a work tile that an earlier CTA group began, and the beginning of
// one that a later CTA group finishes. A CTA gets its range in one of four ways.
//
// - Clusters. In small calls, the CTAs of a cluster divide a work tile by static splits and combine
//   these themselves (mla/cluster_splits.cuh).
// - Static splits. If the shapes say that no work tile can take long, each gets CTA groups of its
//   own. A CTA needs the length of its request only.
// - A plan, which a caller has made from the lengths before (plan.cu).
// - Otherwise each CTA adds up the requests' costs itself, from the lengths in device memory, and
//   takes an equal share. That takes microseconds; a kernel launch for it would take longer. If
//   whole work tiles fit the CTA groups nearly as well, none is split. Otherwise, if all work tiles
//   are nearly equally long, each gets CTA groups of its own.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/divisor.h"
#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/types.h"
#include "mqa_decode/mqa_decode.h"
#include "mqa_decode/tuning.h"

namespace jax_dsa::mqa_decode {

inline constexpr int kWorkTileOverhead = 2;  // in key tiles: the wait for a work tile's first keys,
                                             // and its end
inline constexpr int kMaxCtaGroupSize = 8;
inline constexpr int kClusterRows = 16;  // rows of a work tile that a cluster divides
inline constexpr int kPlanBarrier = 6;   // a named barrier that no other code uses
inline constexpr int kMaxCtaGroups = 2 * kMaxSms;
inline constexpr int kPlanMark = 0x716d6401;  // no other array is likely to have it at this place
static_assert(kMaxCtaGroups == kMqaDecodePlanRanges);

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
  Divisor per_group;  // heads per KV head group
  int rows;           // rows of a KV head group: its heads for each query
  Divisor cta_group_size, row_passes;
  int cta_groups;
  Divisor per_request;           // work tiles of a request
  int work_tiles;                // of all requests
  int combine_cost;              // cost of splitting all work tiles, in key tiles
  int work_tiles_per_cta_group;  // work tiles per CTA group if none is split
  int splits_per_tile;           // so many splits of a work tile cost as much as a key tile
  int static_splits = 0;         // CTA groups of each work tile; 0: no static splits
  Divisor by_static_splits;      // the same, if there are any
  Divisor by_page_size;          // of a paged cache
  bool in_clusters = false;      // the CTAs of each work tile are a cluster

  Decode(const TunedParams& p, int tile_rows, int ctas) : Decode(p) {
    const int tiles = ceil_div(rows, tile_rows);
    const auto work_tiles_at_once = [&](int n) { return double(ctas / n) / ceil_div(tiles, n); };
    double best = 0;
    cta_group_size = 1;
    for (int n = 1; n <= std::min(std::min(tiles, kMaxCtaGroupSize), ctas); ++n) {
      // The keys of a larger CTA group are read less often.
      if (work_tiles_at_once(n) >= 0.95 * best) cta_group_size = n;
      best = std::max(best, work_tiles_at_once(n));
    }
    row_passes = ceil_div(tiles, cta_group_size.value);
    cta_groups = ctas / cta_group_size;
    per_request = groups * row_passes;
    work_tiles = static_cast<int>(batch) * per_request;
    work_tiles_per_cta_group = (int64_t{work_tiles} + cta_groups - 1) / cta_groups;
    // The combine kernel processes a few tiles of 64 rows at a time.
    const int tiles_to_split = std::min(work_tiles, cta_groups);
    combine_cost =
        tuning.combine_cost * (1 + tiles_to_split * cta_group_size * (tile_rows / 64) / 64);
    splits_per_tile = tuning.splits_per_tile * (64 / tile_rows);
    if (work_tiles <= cta_groups) divide_statically(ceil_div(static_cast<int>(keys), kTile));
  }

  // Returns the division of a small call among clusters, which combine their splits themselves. If
  // the call is not small, `in_clusters` is false and nothing else is valid.
  //
  // Each work tile has kClusterRows rows and one cluster, and there are at most as many CTAs as
  // SMs. Compared with static splits, clusters save the combine kernel. On an H200 that is 4 us
  // where static splits would have 32 or 64 rows, whose partial results are larger, and 0.6 us
  // where they would have 16. Each key tile of a CTA takes 1.2 to 2.5 us, and the static splits of
  // a small call have one to three. So clusters may have about two key tiles more with 32 or 64
  // rows, and none with 16.
  static Decode in_clusters_of(const TunedParams& params, int num_sms) {
    Decode p(params);
    const int row_tiles = ceil_div(p.rows, kClusterRows);
    const int64_t work_tiles = p.batch * p.groups * row_tiles;
    const int splits = std::min<int64_t>(num_sms / work_tiles, kMaxClusterSize);
    if (splits < 2) return p;
    const int tiles = ceil_div(static_cast<int>(p.keys), kTile), per_cta = ceil_div(tiles, splits);
    const bool saves_much = p.rows > kClusterRows && !p.v && !p.records;
    if (tiles < 2 || per_cta > ceil_div(p.tuning.max_cluster_tiles, saves_much ? 1 : 3)) return p;
    p.in_clusters = true;
    p.cta_group_size = 1, p.row_passes = row_tiles, p.per_request = p.groups * row_tiles;
    p.work_tiles = static_cast<int>(work_tiles);
    p.splits_per_tile = INT_MAX;
    p.split_statically(ceil_div(tiles, per_cta));
    return p;
  }
  // Whether the sum of all costs is an int.
  bool costs_fit() const {
    const int64_t tiles = ceil_div(keys, int64_t{kTile}) + kWorkTileOverhead + 1;
    return (int64_t{work_tiles} + kMaxCtaGroups) * tiles <= INT32_MAX;
  }
  // Whether there may be work tiles to combine.
  bool may_split() const { return static_splits > 0 ? static_splits > 1 : cta_groups > 1; }
  // Returns the number of key tiles per split of a work tile that has `tiles` key tiles. One more
  // key tile per split must save more time than the combination of the splits that it saves.
  __host__ __device__ int static_split_tiles(int tiles) const {
    int n = (tiles + static_splits - 1) / by_static_splits;
    if (n == 0) n = 1;
    while (int64_t{n} * n * splits_per_tile < tiles) ++n;
    return n;
  }

  __device__ int cta_group() const { return static_cast<int>(blockIdx.x) / cta_group_size; }
  __device__ int cta_rank() const { return blockIdx.x - cta_group() * cta_group_size; }
  // Returns the position of a row of a KV head group in [batch, queries, heads].
  __device__ int row_index(int batch, int group, int row) const {
    const int query = row / per_group, head = group * per_group + row - query * per_group;
    return (batch * static_cast<int>(queries) + query) * heads + head;
  }

 private:
  explicit Decode(const TunedParams& p) : TunedParams(p) {
    per_group = heads / groups;
    rows = static_cast<int>(p.queries) * per_group;
    by_page_size = page_table ? page_size : 1;
  }
  // Divides work tiles by static splits if a split of a request with all `tiles` key tiles is not
  // much longer than an equal share of all work. With several requests there may be much less work.
  void divide_statically(int tiles) {
    const int splits = cta_groups / work_tiles;
    const int64_t share = batch == 1 ? int64_t{tiles} * work_tiles / cta_groups : 0;
    if (ceil_div(tiles, splits) - share > tuning.max_static_tiles) return;
    split_statically(splits);
    split_statically(ceil_div(tiles, static_split_tiles(tiles)));
  }
  void split_statically(int splits) {
    by_static_splits = static_splits = std::max(splits, 1);
    cta_groups = work_tiles * static_splits;
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

// Returns a work range without splits.
__device__ inline MqaDecodeRange no_range(int work_tile) {
  return {work_tile, work_tile - 1, 0, INT_MAX};
}
// The work range of a CTA.
struct WorkRange : MqaDecodeRange {
  int batch, tile;      // the request of the first work tile, and its number within the request
  VisibleKeys visible;  // by the queries of that request
  uint64_t ready;       // mbarrier; completes when everything is written

  // The number of KV splits.
  __device__ int splits() const { return last - first + 1; }
  // `first_visible` are the visible keys of the first work tile, if the range has one.
  __device__ void set(const Decode& p, const MqaDecodeRange& found,
                      const VisibleKeys& first_visible) {
    static_cast<MqaDecodeRange&>(*this) = found;
    batch = found.first / p.per_request, tile = found.first - batch * p.per_request;
    visible = first_visible;
  }
};

// Must be called before the first __syncthreads.
__device__ inline void initialise(WorkRange& range) {
  if (threadIdx.x == 0) mbarrier_init(&range.ready, 1);
}
__device__ inline void wait_for(WorkRange& range) { mbarrier_wait(&range.ready, 0); }

// Divides all work tiles into equal work ranges, and finds one of these. kThreads threads do so
// together, each of which knows the cost of some requests.
template <int kThreads>
struct WorkRangeFinder {
  struct Scratch {
    int sums[kThreads / 32], tops[kThreads / 32];
  };
  const Decode& p;
  int first, last;      // this thread's requests
  int own_cost = 0;     // of this thread's requests
  int cost_before = 0;  // of all requests before them
  int max_cost = 0;     // of a work tile
  int range_cost;       // of a work range; the first `longer_ranges` ranges have one more
  int longer_ranges;
  int cta_group, begin, end;  // the range within the cost of all work
  int uniform_cost;  // cost of every work tile, in key tiles, if all are treated as equally long;
                     // otherwise 0

  __device__ WorkRangeFinder(const Decode& p, int cta_group, Scratch& scratch)
      : p(p), cta_group(cta_group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int batch = static_cast<int>(p.batch), chunk = ceil_div(batch, kThreads);
    first = min(chunk * static_cast<int>(threadIdx.x), batch);
    last = min(first + chunk, batch);
    for (int b = first; b < last; ++b) {
      const int tile_cost = work_tile_cost(visible_keys_by_thread(p, b));
      own_cost += tile_cost * p.per_request;
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
    const int tiles = max(max_cost - kWorkTileOverhead, 1);
    uniform_cost = 0;
    if (int64_t{p.work_tiles_per_cta_group} * max_cost <= range_cost + p.combine_cost) {
      range_cost = p.work_tiles_per_cta_group * tiles;
      uniform_cost = tiles;
    } else if (busy >= 2 * p.work_tiles) {
      const int splits_per_tile = quotient(busy, p.work_tiles);
      const int split_cost = ceil_div(tiles, splits_per_tile);
      if (split_cost <= range_cost + 1) {
        range_cost = split_cost, uniform_cost = split_cost * splits_per_tile;
      }
    }
    if (uniform_cost > 0) {
      own_cost = (last - first) * p.per_request * uniform_cost;
      cost_before = first * p.per_request * uniform_cost;
      total = p.work_tiles * uniform_cost;
      longer_ranges = 0;
    }
    begin = min(range_cost * cta_group + min(cta_group, longer_ranges), total);
    end = min(begin + range_cost + (cta_group < longer_ranges ? 1 : 0), total);
  }

  // Writes the range. All threads see it after the next barrier.
  __device__ void write(WorkRange& range) const {
    if (begin >= end && threadIdx.x == 0) range.set(p, no_range(0), {});
    if (has(begin)) {
      const WorkTile x = find(begin);
      range.batch = x.batch, range.tile = x.tile, range.visible = x.visible;
      range.first = x.batch * p.per_request + x.tile, range.from = key_tiles(begin - x.begin);
    }
    if (has(end - 1)) {
      const WorkTile x = find(end - 1);
      // A range does not end between the beginning of a work tile and its first key tile.
      const int to = key_tiles(end - x.begin), index = x.batch * p.per_request + x.tile;
      const bool whole = end == x.begin + x.tile_cost;
      range.last = to == 0 && !whole ? index - 1 : index;
      range.to = to == 0 || whole ? INT_MAX : to;
      const bool begins = x.begin >= begin || key_tiles(begin - x.begin) == 0;
      range.splits_of_last = range.to < INT_MAX && begins ? splits_from(x) : 0;
    }
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
      if (at < position + tile_cost * p.per_request) {
        const int tile = p.per_request == 1 ? 0 : quotient(at - position, tile_cost);
        return {visible, b, tile, position + tile * tile_cost, tile_cost};
      }
      position += tile_cost * p.per_request;
    }
  }
  // Returns how many key tiles a part of a work tile's cost stands for.
  __device__ int key_tiles(int cost) const {
    return uniform_cost > 0 ? cost : max(cost - kWorkTileOverhead, 0);
  }
  // Returns the number of splits of the work tile, of which this range has the first.
  __device__ int splits_from(const WorkTile& x) const {
    const int at = x.begin + x.tile_cost - 1, rest = at - longer_ranges * (range_cost + 1);
    const int group = rest < 0 ? at / (range_cost + 1) : longer_ranges + rest / range_cost;
    return group - cta_group + 1;
  }
};

// Finds the range of a CTA group if work tiles are divided by static splits. Called by a warp.
__device__ inline void find_static_range(const Decode& p, int cta_group, WorkRange& range) {
  const int work_tile = cta_group / p.by_static_splits;
  const int split = cta_group - work_tile * p.static_splits;
  const VisibleKeys visible = visible_keys_by_warp(p, work_tile / p.per_request);
  const int tiles = visible.tiles(), length = p.static_split_tiles(tiles);
  const int from = split * length, to = from + length < tiles ? from + length : INT_MAX;
  MqaDecodeRange found = no_range(work_tile);
  if (split == 0 || from < tiles || p.in_clusters)
    found.last = work_tile, found.from = from, found.to = to;
  if (threadIdx.x == 0) range.set(p, found, visible);
}

// Reads a range of a plan.
__device__ inline MqaDecodeRange load_range(const MqaDecodeRange* from) {
  const auto* const at = reinterpret_cast<const int4*>(from);
  const int4 a = __ldg(at), b = __ldg(at + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// Returns whether a range of a plan is one for this call. If the plan was made for a call of other
// sizes, or is no plan at all, nothing is read or written out of bounds.
__device__ inline bool is_planned(const Decode& p, int cta_group, const MqaDecodeRange& x) {
  return x.mark == kPlanMark && x.work_tiles == p.work_tiles && x.cta_groups == p.cta_groups &&
         x.last < p.work_tiles && x.first >= 0 && x.first <= x.last + 1 && x.from >= 0 &&
         x.to >= 0 && x.splits_of_last >= 0 && x.splits_of_last <= p.cta_groups - cta_group;
}

// Finds this CTA's work range, with the kThreads threads of the MMA warpgroups. The producer waits
// for the range and starts.
template <int kThreads>
__device__ __forceinline__ void find_work_range(
    const Decode& p, typename WorkRangeFinder<kThreads>::Scratch& scratch, WorkRange& range) {
  const int cta_group = p.cta_group();
  MqaDecodeRange planned = {};
  if (p.static_splits == 0 && p.plan) planned = load_range(p.plan + cta_group);
  if (p.static_splits > 0) {
    if (threadIdx.x < 32) find_static_range(p, cta_group, range);
  } else if (is_planned(p, cta_group, planned)) {
    if (threadIdx.x < 32) {
      VisibleKeys visible;
      if (planned.first <= planned.last) {
        visible = visible_keys_by_warp(p, planned.first / p.per_request);
      }
      if (threadIdx.x == 0) range.set(p, planned, visible);
    }
  } else {
    WorkRangeFinder<kThreads>(p, cta_group, scratch).write(range);
  }
  named_barrier_sync<kThreads>(kPlanBarrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive(&range.ready);
    if (p.static_splits == 0 && p.cta_rank() == 0) {
      p.split_tiles[cta_group] = make_int2(range.last, range.splits_of_last);
    }
  }
}

}  // namespace jax_dsa::mqa_decode
