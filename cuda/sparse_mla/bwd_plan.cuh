// What the parts of the sparse MLA backward kernel share. See bwd.cuh.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/device.h"
#include "common/gather.cuh"
#include "common/limits.h"
#include "common/types.h"
#include "mla/plan.cuh"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa::sparse_mla {

using mla::kHeads;
using mla::kThreads;

inline constexpr int kTileImages = 2;     // P and dS of 64 heads and 64 slots, a block each
inline constexpr int kKeyTiles = 2;       // head tiles that an item of the keys' kind contracts
inline constexpr int kOrderSlots = 8192;  // queries of more slots share nothing
inline constexpr int kWindowTiles = 8;    // of slots, at least, that a window has of a step
inline constexpr int kMemberHeads = 8;    // of packed queries, that share a bit below each index
inline constexpr int kMemberBits = kHeads / kMemberHeads;
// The order in which the blocks of a key tile are used and come free. The first warpgroup frees
// those from 6 on, the second one the others.
__host__ __device__ constexpr int block_order(int i) {
  return i < 2 || i == 8 ? i : i < 4 ? i + 4 : i - 2;
}

// The counters start with the next ticket, in 16 bytes of its own.
inline constexpr int kTicketWords = 4;

// A step's counters; all zero when the kernel starts.
struct BwdCounters {
  uint32_t written;  // warps that have stored their P and dS of an item
  uint32_t read;     // items of the keys' kind that have read them
};

// The distance, in tickets, between the item that writes P and dS and the one that reads them.
// Below two for each resident block readers stall; above, only the workspace grows, which is
// allocated before the device is known.
inline int tickets_behind(const Device& device) { return 2 * std::min(device.num_sms, kMaxSms); }
// Reductions go into windows of the keys of about so many bytes of dkv in turn, if there are enough
// slots: 20 MiB are best on an H200, whose L2 has 60 and keeps P and dS, too. A smaller L2 has them
// as long as they are two fifths of it, as of the 50 MiB of an H100.
inline int64_t window_bytes(const Device& device) {
  return std::min(int64_t{20} << 20, std::max<int64_t>(device.l2_bytes * 2 / 5, 1));
}
inline constexpr Device kLargestDevice = {kMaxSms, int64_t{60} << 20};

// Sizes of the work, in the words of bwd.cuh.
struct BwdWork {
  int64_t rows;
  int64_t tickets;
  int steps;
  int head_tiles;  // of a row
  int span;        // rows of a step
  int pairs;       // of a step's sources, ceil
  int slot_tiles;  // at most, of a row
  int windows;     // of a step
  int lag;         // steps that the keys' kind follows behind the queries' kind
  int ring;        // steps whose images have room at the same time

  explicit BwdWork(const SparseMlaBwdParams& p, const Device& device = kLargestDevice)
      : rows(p.count * p.groups),
        head_tiles(std::max(1, ceil_div(p.heads / p.groups, kHeads))),
        span(head_tiles == 1 ? 2 : 1),
        pairs(ceil_div(sources(), kKeyTiles)),
        slot_tiles(ceil_div(p.slots, kTile)) {
    const int64_t steps = ceil_div(rows, int64_t{span});
    const int most = std::max(1, span * slot_tiles / kWindowTiles);
    const int64_t fit = ceil_div(p.keys * p.groups * p.dim * 4, window_bytes(device));
    windows = p.by_rows ? 1 : static_cast<int>(std::clamp<int64_t>(fit, 1, most));
    tickets = steps * per_step();
    this->steps = static_cast<int>(steps);
    const int64_t round = ceil_div(tickets_behind(device), sources() + window_items());
    lag = static_cast<int>(std::min(steps, round));
    ring = 2 * lag;
  }
  __host__ __device__ int sources() const { return span * head_tiles; }  // head tiles of a step
  __host__ __device__ int window_items() const { return pairs * 2; }     // of a step
  __host__ __device__ int keys_items() const { return windows * window_items(); }
  __host__ __device__ int per_step() const { return sources() + keys_items(); }
  // Sums of 128 heads, or of fewer, that a slot of a row has.
  __host__ __device__ int row_sums() const { return ceil_div(head_tiles, kKeyTiles); }
  int64_t image_blocks() const { return int64_t{ring} * sources() * slot_tiles * kTileImages; }
  // Whether a step's rows may share sums, by an order of their slots.
  bool shares(const SparseMlaBwdParams& p) const {
    return span == 2 && rows > 1 && p.groups == 1 && p.slots <= kOrderSlots && !p.by_rows;
  }
};

struct BwdItem {
  bool over;  // there is no more work
  bool keys;  // which kind
  int step;
  int part;    // source; or 2 * pair + half
  int window;  // of the keys' kind

  // The queries' kind of `lag` steps, then turns. The keys' kind is in order within `lag` steps:
  // the first window of each of them, the next window of each, and so on.
  __device__ BwdItem(const BwdWork& work, unsigned ticket)
      : over(ticket >= work.tickets), keys(false), step(0), part(0), window(0) {
    if (over) return;
    const unsigned sources = work.sources(), ramp = work.lag * sources;
    if (ticket < ramp) {
      step = ticket / sources;
      part = ticket % sources;
      return;
    }
    ticket -= ramp;
    // The last turns have the keys' kind only.
    const unsigned both = work.steps - work.lag, in_both = both * work.per_step();
    const unsigned rest = ticket - min(ticket, in_both);
    ticket -= rest;
    const unsigned turn = ticket / work.per_step() + rest / work.keys_items();
    unsigned place = ticket % work.per_step() + rest % work.keys_items();
    if (turn < both && place < sources) {
      step = turn + work.lag;
      part = place;
      return;
    }
    keys = true;
    if (turn < both) place -= sources;
    const unsigned first = turn / work.lag * work.lag, steps = min(work.lag, work.steps - first);
    place += (turn - first) * work.keys_items();
    window = place / (steps * work.window_items());
    place %= steps * work.window_items();
    step = first + place / work.window_items();
    part = place % work.window_items();
  }
};

inline int64_t counter_bytes(const BwdWork& work) {
  return kTicketWords * 4 + work.steps * int64_t{sizeof(BwdCounters)};
}
__device__ inline BwdCounters* bwd_counters(const SparseMlaBwdParams& p) {
  return reinterpret_cast<BwdCounters*>(static_cast<uint32_t*>(p.counters) + kTicketWords);
}

// Where the images of a step's source begin.
__device__ inline char* image(const SparseMlaBwdParams& p, const BwdWork& work, int step,
                              int source) {
  const int64_t at = step % work.ring * work.sources() + source;
  return static_cast<char*>(p.images) + at * work.slot_tiles * kTileImages * kBlockBytes;
}

// A head tile of a step: heads of one row, with their place in [batch, queries, heads, ...].
struct HeadTile {
  int row, group;
  int64_t token;  // batch * queries + query
  int64_t first;  // place of the first head
  int heads;      // at most 64; 0 if there is no such row

  __device__ HeadTile(const SparseMlaBwdParams& p, const BwdWork& work, int step, int source) {
    const int per_group = p.heads / p.groups, tile = source % work.head_tiles;
    row = step * work.span + source / work.head_tiles;
    const bool exists = row < work.rows;
    if (!exists) --row;
    token = p.first + row / p.groups, group = row % p.groups;
    first = token * p.heads + group * per_group + tile * kHeads;
    heads = exists ? min(per_group - tile * kHeads, kHeads) : 0;
  }
  __device__ int64_t batch(const SparseMlaBwdParams& p) const {
    return static_cast<int>(token) / static_cast<int>(p.queries);
  }
  // Packed indices are shifted, with members below them; with the limit shifted, too, whether a
  // slot counts is the same question.
  __device__ Slots slots(const SparseMlaBwdParams& p) const {
    Slots slots(p, token, group);
    slots.limit <<= p.member_bits;
    return slots;
  }
  // Of slots; by all lanes.
  __device__ int tiles(const SparseMlaBwdParams& p, int lane) const {
    return heads > 0 ? count_tiles(slots(p), lane) : 0;
  }
};

// `order`, if rows share sums: the indices in their new order, then for each step, how many tiles
// of slots its two rows have in common.
inline int64_t order_words(const SparseMlaBwdParams& p, const BwdWork& work) {
  return work.shares(p) ? work.rows * p.slots + work.steps : 0;
}
__device__ inline int32_t* common_tiles(const SparseMlaBwdParams& p, const BwdWork& work) {
  return p.order + work.rows * p.slots;
}

// The tiles of slots of an item of the keys' kind, whose one or two head tiles are of the same row
// and have all tiles in common, or of two rows that have the first tiles in common. So there are
// three ranges: common tiles, others of the first row, others of the second row.
struct TileList {
  struct Source {
    int tiles;
    Slots slots;
    int64_t dkv;   // where the gradient of key 0 begins
    int64_t sums;  // or its row of slot 0
  };
  int head_tiles;
  int end[3];     // of a range, in this list
  int offset[3];  // from a place in this list to the tile
  Source source[2];

  // Of each range, the window-th of `windows` parts.
  __device__ TileList(int head_tiles, const Source& first, const Source& second, int common,
                      int window, int windows)
      : head_tiles(head_tiles), source{first, second} {
    const int limits[3][2] = {{0, common}, {common, first.tiles}, {common, second.tiles}};
    int count = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int size = limits[i][1] - limits[i][0], begin = size * window / windows;
      offset[i] = limits[i][0] + begin - count;
      count += size * (window + 1) / windows - begin;
      end[i] = count;
    }
  }
  __device__ int tiles() const { return end[2]; }
  // The n-th is tile `tile` of `number` head tiles from `first` on.
  __device__ void find(int n, int* tile, int* first, int* number) const {
    const int range = (n >= end[0]) + (n >= end[1]);
    *first = range / 2;
    *number = range == 0 ? head_tiles : 1;
    *tile = n + offset[range];
  }
};

template <int kD>
struct alignas(1024) BwdShared {
  static constexpr int kBlocks = kD / 64;

  struct Queries {
    uint8_t operand[kBlocks + 8][kBlockBytes];  // q and dout in turns; q's ninth block
    uint8_t keys[kBlocks][kBlockBytes];
    uint8_t p[kBlockBytes];   // of the tile at hand, rows are slots
    uint8_t ds[kBlockBytes];  // and dS
    float2 of_head[kHeads];   // lse in log2 units, delta
    uint8_t members[kTile];   // of the tile's slots: a bit for every 8 heads
  };
  struct Keys {
    uint8_t q[kKeyTiles][4][kBlockBytes];  // half of the value columns
    uint8_t dout[kKeyTiles][4][kBlockBytes];
    uint8_t ninth[kKeyTiles][kBlockBytes];                   // q's ninth block
    uint8_t images[2][kKeyTiles][kTileImages][kBlockBytes];  // by warpgroup
    uint8_t stage[8][1024];                                  // each warp's, for its sums
  };
  union {
    Queries queries;
    Keys keys;
  };
  // So q and dout have room as soon as those of the item before have been read.
  static_assert(offsetof(Keys, ninth) <= offsetof(Queries, keys));
  ValidRows valid;     // of the tile at hand
  BwdItem item[2];     // this one and the next
  int tiles;           // of slots, of the item, if of the queries' kind
  TileList list;       // or of the keys' kind
  uint64_t rows_full;  // Q and dO of the item are here
  uint64_t block_full[kBlocks], block_free[kBlocks];
  uint64_t image_full[2], image_free[2];  // by warpgroup
  uint64_t item_done;                     // the multiplying warps are ready for the next item
  // In turns: a warp may not yet have seen one item when the next one is here.
  uint64_t item_full[2];
  uint64_t operand_free;  // q and dout of an item of the queries' kind have been read
};

// Named barriers; 0 is __syncthreads. Of two multiplying warpgroups, one waits.
enum BwdBarrier {
  kHeadsReady = 1,   // in the first warpgroup
  kGradientsReady,   // the second one waits
  kFirstBlocksFree,  // the first one waits
  kGradientsRead,    // the second one waits
  kItemTaken,        // in the warpgroup that copies
};

}  // namespace jax_dsa::sparse_mla
