// What the parts of the sparse MLA backward kernel share. See bwd.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/types.h"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa::sparse_mla {

inline constexpr int kTileImages = 2;     // P and dS of 64 heads and 64 slots, a block each
inline constexpr int kKeyTiles = 2;       // head tiles that an item of the keys' kind contracts
inline constexpr int kOrderSlots = 8192;  // queries of more slots share nothing
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

// Sizes of the work, the same for launcher and kernel. A "row" is a query and group of keys, a
// "step" one row, or two if a row has only one head tile.
struct BwdWork {
  int64_t rows, steps;
  int head_tiles;  // of a row
  int span;        // rows of a step
  int pairs;       // of a step's head tiles, ceil
  int slot_tiles;  // at most, of a row
  int lag;         // steps that the second kind of item follows behind the first
  int ring;        // steps whose P and dS have room at the same time

  __host__ __device__ explicit BwdWork(const SparseMlaBwdParams& p)
      : rows(p.count * p.groups),
        head_tiles(ceil_div(p.heads / p.groups, kHeads)),
        span(head_tiles == 1 ? 2 : 1),
        slot_tiles(ceil_div(p.slots, kTile)) {
    steps = ceil_div(rows, int64_t{span});
    pairs = ceil_div(sources(), kKeyTiles);
    const int64_t round = ceil_div(p.tickets_behind, per_step());
    lag = static_cast<int>(steps < round ? steps : round);
    ring = 2 * lag;
  }
  __host__ __device__ int sources() const { return span * head_tiles; }  // head tiles of a step
  __host__ __device__ int keys_items() const { return pairs * 2; }
  __host__ __device__ int per_step() const { return sources() + keys_items(); }
  __host__ __device__ int64_t tickets() const { return steps * per_step(); }
  __host__ __device__ int64_t image_blocks() const {
    return int64_t{ring} * sources() * slot_tiles * kTileImages;
  }
  // Sums of 128 heads, or of fewer, that a slot of a row has.
  __host__ __device__ int row_sums() const { return ceil_div(head_tiles, kKeyTiles); }
  // Whether a step's rows may share sums, by an order of their slots.
  __host__ __device__ bool shares(const SparseMlaBwdParams& p) const {
    return span == 2 && rows > 1 && p.groups == 1 && p.slots <= kOrderSlots && !p.by_rows;
  }
};

// One piece of work: of the queries' kind (P, dS and dQ of 64 heads), or of the keys' kind (dKV of
// two head tiles, half of the columns).
struct BwdItem {
  bool keys;
  int64_t step;
  int part;  // head tile of the step; or 2 * pair + half

  // Steps start with their first kind, and `lag` steps later follows the second.
  __device__ BwdItem(const BwdWork& work, int64_t ticket) {
    const int64_t ramp = int64_t{work.lag} * work.sources();
    if (ticket < ramp) {
      keys = false;
      step = ticket / work.sources();
      part = static_cast<int>(ticket % work.sources());
      return;
    }
    ticket -= ramp;
    const int64_t both = work.steps - work.lag;
    if (ticket < both * work.per_step()) {
      step = ticket / work.per_step();
      part = static_cast<int>(ticket % work.per_step());
      keys = part >= work.sources();
      if (keys) {
        part -= work.sources();
      } else {
        step += work.lag;
      }
      return;
    }
    ticket -= both * work.per_step();
    keys = true;
    step = both + ticket / work.keys_items();
    part = static_cast<int>(ticket % work.keys_items());
  }
};

__device__ inline BwdCounters* bwd_counters(const SparseMlaBwdParams& p) {
  return reinterpret_cast<BwdCounters*>(static_cast<uint32_t*>(p.counters) + kTicketWords);
}

// Where P and dS of a step's head tile begin.
__device__ inline char* image(const SparseMlaBwdParams& p, const BwdWork& work, int64_t step,
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

  __device__ HeadTile(const SparseMlaBwdParams& p, const BwdWork& work, int64_t step, int source) {
    const int per_group = p.heads / p.groups, tile = source % work.head_tiles;
    row = static_cast<int>(step * work.span + source / work.head_tiles);
    const bool exists = row < work.rows;
    if (!exists) --row;
    token = p.first + row / p.groups, group = row % p.groups;
    first = token * p.heads + group * per_group + tile * kHeads;
    heads = exists ? min(per_group - tile * kHeads, kHeads) : 0;
  }
  __device__ int64_t batch(const SparseMlaBwdParams& p) const {
    return static_cast<int>(token) / static_cast<int>(p.queries);
  }
  __device__ Slots slots(const SparseMlaBwdParams& p) const { return Slots(p, token, group); }
  // Of slots; by all lanes.
  __device__ int tiles(const SparseMlaBwdParams& p, int lane) const {
    return heads > 0 ? slots(p).tiles(lane) : 0;
  }
};

// For each step, how many tiles of slots its two rows have in common: after the ordered indices.
__device__ inline int32_t* common_tiles(const SparseMlaBwdParams& p, const BwdWork& work) {
  return p.order + work.rows * p.slots;
}

// The tiles of slots of an item of the keys' kind, whose one or two head tiles are of the same row
// and have all tiles in common, or of two rows that have the first `common` tiles in common.
struct TileList {
  struct Source {
    int tiles;
    Slots slots;
    int64_t dkv;   // where the gradient of key 0 begins
    int64_t sums;  // or its row of slot 0
  };
  int common;
  int head_tiles;
  Source source[2];

  __device__ int count() const { return source[0].tiles + source[1].tiles - common; }
  // The n-th is tile `tile` of `number` head tiles from `first` on.
  __device__ void find(int n, int* tile, int* first, int* number) const {
    *first = n < source[0].tiles ? 0 : 1;
    *number = n < common ? head_tiles : 1;
    *tile = n < source[0].tiles ? n : n - source[0].tiles + common;
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
  uint8_t valid[kTile / 8];  // bit r % 8 of [r / 8]: key row r of the tile counts
  int ticket[2];             // of this item and the next
  int tiles;                 // of slots, of the item, if of the queries' kind
  TileList list;             // or of the keys' kind
  uint64_t rows_full;        // Q and dO of the item are here
  uint64_t block_full[kBlocks], block_free[kBlocks];
  uint64_t image_full[2], image_free[2];  // by warpgroup
  uint64_t item_done;                     // the multiplying warps are ready for the next item
  // In turns: a warp may not yet have seen one ticket when the next one is here.
  uint64_t ticket_full[2];
  uint64_t operand_free;  // q and dout of an item of the queries' kind have been read
};

// Named barriers of the multiplying warpgroups; 0 is __syncthreads. Of two warpgroups, one waits.
enum BwdBarrier {
  kHeadsReady = 1,   // in the first warpgroup
  kGradientsStored,  // in the first warpgroup
  kGradientsReady,   // the second one waits
  kFirstBlocksFree,  // the first one waits
  kGradientsRead,    // the second one waits
};

}  // namespace jax_dsa::sparse_mla
