// Who does what in the mqa_decode kernels.
//
// An item is a request, a group and a pass: its tiles of 64 keys, and so many row tiles at a time
// as a team has blocks. All items in order, each of its tiles and kItemCost, are cut into equal
// shares, one a team; the blocks of a team have the same share, each another row tile, and so read
// the same keys at the same time. Each block adds up the requests' tiles itself, from the lengths
// that are on the device: that takes microseconds, another kernel before would take longer.
//
// What a share has of an item is a piece. Pieces that are not whole leave results for the merge
// kernel: of each block at most two, the end of an item that an earlier team began and the
// beginning of one that a later team ends. Where whole items fit the teams nearly as well, none is
// cut; else where all items are nearly as long, each is cut by teams of its own.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "common/types.h"
#include "mqa_decode/mqa_decode.h"

namespace jax_dsa::mqa_decode {

inline constexpr int kItemCost = 2;  // in tiles: until an item's first keys are there, and its end
inline constexpr int kMaxMembers = 8;
inline constexpr int kSumsHere = 6;  // a named barrier that no other code has
inline constexpr int kMaxTeams = 2 * kMaxSms;

// a / b of a >= 0 and b > 0, which is a power of two more often than not; a division takes a
// hundred cycles, of which a kernel's start would have many.
__device__ __forceinline__ int quotient(int a, int b) {
  return (b & (b - 1)) == 0 ? a >> (__ffs(b) - 1) : a / b;
}

// The parameters, and what the launcher derives from them.
struct Decode : MqaDecodeParams {
  int per_group;  // heads
  int rows;       // of a group: queries, and in each its heads
  int members, passes, teams;
  int merge_cost;    // of cutting all items
  int items_a_team;  // if none is cut

  Decode(const MqaDecodeParams& p, int tile_rows, int blocks) : MqaDecodeParams(p) {
    per_group = heads / groups;
    rows = static_cast<int>(p.queries) * per_group;
    const int tiles = ceil_div(rows, tile_rows);
    const auto items_a_time = [&](int n) { return double(blocks / n) / ceil_div(tiles, n); };
    double best = 0;
    members = 1;
    for (int n = 1; n <= std::min(std::min(tiles, kMaxMembers), blocks); ++n) {
      // The keys of a larger team are read less often.
      if (items_a_time(n) >= 0.95 * best) members = n;
      best = std::max(best, items_a_time(n));
    }
    passes = ceil_div(tiles, members);
    teams = blocks / members;
    const int64_t items = batch * groups * passes;
    items_a_team = static_cast<int>(ceil_div(items, int64_t{teams}));
    // The merge kernel takes a few tiles of 64 rows at a time.
    const int64_t cuts = std::min<int64_t>(items, teams);
    merge_cost = tuning.merge_cost * (1 + static_cast<int>(cuts) * members * (tile_rows / 64) / 64);
  }

  __device__ int team() const { return quotient(blockIdx.x, members); }
  __device__ int member() const { return blockIdx.x - team() * members; }
  // Where a row of a group lies among [batch, queries, heads].
  __device__ int place(int batch, int group, int row) const {
    const int query = quotient(row, per_group), head = group * per_group + row - query * per_group;
    return (batch * static_cast<int>(queries) + query) * heads + head;
  }
};

// The keys that some of a request's queries see, low..high-1, and those that all do.
struct Seen {
  int low = INT_MAX, high = 0;
  int low_of_all = 0, high_of_all = INT_MAX;

  __device__ void add(const Decode& p, int64_t token) {
    const int start = max(__ldg(p.starts + token), 0);
    const int end = max(min(__ldg(p.ends + token), static_cast<int>(p.keys)), 0);
    if (start < end) {
      low = min(low, start);
      high = max(high, end);
    }
    low_of_all = max(low_of_all, start);
    high_of_all = min(high_of_all, end);
  }
  __device__ int first() const { return low < high ? low / kTile * kTile : 0; }
  __device__ int tiles() const { return low < high ? ceil_div(high - first(), kTile) : 0; }
  // Of the tile from `key` on.
  __device__ bool by_all(int key) const { return low_of_all <= key && key <= high_of_all - kTile; }
};

// By a thread; or, faster, by a whole warp.
__device__ inline Seen seen_by_thread(const Decode& p, int64_t batch) {
  Seen x;
#pragma unroll 1
  for (int t = 0; t < p.queries; ++t) x.add(p, batch * p.queries + t);
  return x;
}
__device__ inline Seen seen_by_warp(const Decode& p, int64_t batch) {
  Seen x;
#pragma unroll 1
  for (int t = threadIdx.x % 32; t < p.queries; t += 32) x.add(p, batch * p.queries + t);
  x.low = __reduce_min_sync(~0u, x.low);
  x.high = __reduce_max_sync(~0u, x.high);
  x.low_of_all = __reduce_max_sync(~0u, x.low_of_all);
  x.high_of_all = __reduce_min_sync(~0u, x.high_of_all);
  return x;
}

// Of an item of this request.
__device__ inline int cost(const Seen& x) { return kItemCost + x.tiles(); }

// A place in the order of all work.
struct Position {
  int batch, number;  // the item, and which it is of its request
  int before;         // how much of the item's cost comes before
};

// A team's share.
struct Share {
  Position first;
  Seen seen;  // by the first item's queries
  int work;
  int alike;      // what every item counts for where all are treated alike, in tiles; or 0
  int pieces;     // known after `find_last_item`
  uint64_t here;  // completes when all but `pieces` is written
};

// Before all threads meet.
__device__ inline void initialise(Share& share) {
  if (threadIdx.x == 0) mbarrier_init(&share.here, 1);
}
__device__ inline void wait_for(Share& share) { mbarrier_wait(&share.here, 0); }

// Finds this block's share, by the warpgroups that multiply, whose kThreads threads each know some
// requests' part of all work. The producer waits for it and begins; `find_last_item`
// tells the others how many pieces there are.
template <int kThreads>
struct ShareFinder {
  struct Scratch {
    int sums[kThreads / 32], tops[kThreads / 32];
  };
  const Decode& p;
  Share& share;
  int per_request;
  int first, last;                  // requests
  int own = 0, up_to = 0, top = 0;  // their cost, and that of those before; the most of an item
  int each, more, begin, end;       // `more` teams have one more than `each`
  int alike;

  __device__ ShareFinder(const Decode& p, Scratch& scratch, Share& share)
      : p(p), share(share), per_request(p.groups * p.passes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int batch = static_cast<int>(p.batch), chunk = ceil_div(batch, kThreads);
    first = min(chunk * static_cast<int>(threadIdx.x), batch);
    last = min(first + chunk, batch);
    for (int b = first; b < last; ++b) {
      const int its = cost(seen_by_thread(p, b));
      own += its * per_request;
      top = max(top, its);
    }
    up_to = inclusive_scan(own);
    top = __reduce_max_sync(~0u, top);
    if (lane == 31) scratch.sums[warp] = up_to, scratch.tops[warp] = top;
    named_barrier_sync<kThreads>(kSumsHere);
    up_to -= own;
    int total = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) up_to += scratch.sums[i];
      total += scratch.sums[i];
      top = max(top, scratch.tops[i]);
    }
    int busy = p.teams;
    if (total < p.teams * p.tuning.least) busy = max(quotient(total, p.tuning.least), 1);
    each = quotient(total, busy), more = total - each * busy;
    const int items = batch * per_request, tiles = max(top - kItemCost, 1);
    alike = 0;
    if (int64_t{p.items_a_team} * top <= each + p.merge_cost) {
      each = p.items_a_team * tiles;
      alike = tiles;
    } else if (busy >= 2 * items) {
      const int parts = quotient(busy, items), part = ceil_div(tiles, parts);
      if (part <= each + 1) each = part, alike = part * parts;
    }
    if (alike > 0) {
      own = (last - first) * per_request * alike;
      up_to = first * per_request * alike;
      total = items * alike;
      more = 0;
    }
    const int team = p.team();
    begin = min(each * team + min(team, more), total);
    end = min(begin + each + (team < more ? 1 : 0), total);
    if (threadIdx.x == 0) {
      share.work = end - begin;
      share.alike = alike;
      share.pieces = 0;
      if (p.member() == 0) p.cuts[team] = make_int2(0, 0);
    }
    if (has(begin)) {
      const Item item = find(begin);
      share.first = {item.batch, item.number, begin - item.begin};
      share.seen = item.seen;
    }
    named_barrier_sync<kThreads>(kSumsHere);
    if (threadIdx.x == 0) mbarrier_arrive(&share.here);
  }

  // Counts the pieces; and if the last item is cut at the share's end and begins with it, writes
  // down for the merge kernel which item it is and of how many parts.
  __device__ void find_last_item() {
    if (has(end - 1)) {
      const Item item = find(end - 1);
      share.pieces =
          (item.batch - share.first.batch) * per_request + item.number - share.first.number + 1;
      const int item_end = item.begin + item.its;
      if (p.member() == 0 && item.begin >= begin && item_end > end) {
        const int longer = more * (each + 1), rest = item_end - 1 - longer;
        const int last_team = rest < 0 ? (item_end - 1) / (each + 1) : more + rest / each;
        p.cuts[p.team()] =
            make_int2(item.batch * per_request + item.number, last_team - p.team() + 1);
      }
    }
    named_barrier_sync<kThreads>(kSumsHere);
  }

 private:
  struct Item {
    Seen seen;
    int batch, number, begin, its;
  };
  __device__ bool has(int at) const { return begin < end && at >= up_to && at < up_to + own; }
  __device__ Item find(int at) const {
    for (int b = first, before = up_to;; ++b) {
      const Seen seen = seen_by_thread(p, b);
      const int its = alike > 0 ? alike : cost(seen);
      if (at < before + its * per_request) {
        const int number = per_request == 1 ? 0 : quotient(at - before, its);
        return {seen, b, number, before + number * its, its};
      }
      before += its * per_request;
    }
  }
};

// What consumers have to know of a piece.
struct Piece {
  int batch, group, row;  // the first of its row tile
  int slot;               // for its partial results; -1: they are final
  bool has_tiles;
};
// A piece's partial results are lines of 128 floats: rows one after the other, or where kWide, as
// the accumulators hold them, by columns' half, warp and eight columns. This is where a lane's four
// floats of a line belong: side by side in one row; or two in a row, two in the row 8 below.
template <bool kWide>
struct PieceLine {
  static constexpr int kColumns = kWide ? 8 : 128;  // from a line to the next of the same rows
  int row, column;

  __device__ PieceLine(int line, int value_dim) {
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
// Results are written after the next pieces' keys have come.
inline constexpr int kPieces = 4;

// The pieces of a block's share; by a whole warp.
struct Walk {
  const Decode& p;
  const Share& share;
  int tile_rows;
  int number = -1;  // of the piece
  int batch, rest;  // its request, and which of its items
  int left;
  Seen seen;
  Piece piece;
  int first, tiles;  // the piece's first key and its tiles

  __device__ Walk(const Decode& p, const Share& share, int tile_rows)
      : p(p),
        share(share),
        tile_rows(tile_rows),
        batch(share.first.batch),
        rest(share.first.number),
        left(share.work),
        seen(share.seen) {}

  __device__ bool next() {
    if (left <= 0) return false;
    if (++number > 0 && ++rest == p.groups * p.passes) {
      rest = 0;
      seen = seen_by_warp(p, ++batch);
    }
    const int group = quotient(rest, p.passes);
    const int row = ((rest - group * p.passes) * p.members + p.member()) * tile_rows;
    const int begin = number == 0 ? share.first.before : 0;
    const int all = share.alike > 0 ? share.alike : cost(seen);
    const int stop = left < all - begin ? begin + left : all;
    left -= stop - begin;
    const bool final = begin == 0 && stop == all;
    const int before = share.alike > 0 ? 0 : kItemCost, from = max(begin - before, 0);
    first = seen.first() + from * kTile;
    tiles = row < p.rows ? max(min(stop - before, seen.tiles()) - from, 0) : 0;
    piece = {batch, group, row, final ? -1 : static_cast<int>(blockIdx.x) * 2 + (begin == 0),
             tiles > 0};
    return true;
  }
};

}  // namespace jax_dsa::mqa_decode
