// What the parts of the sparse MLA backward kernel share. See bwd.cuh.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/fwd_producer.cuh"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa::sparse_mla {

inline constexpr int kTileImages = 2;  // P and dS of 64 heads and 64 slots, a block each
inline constexpr int kKeyTiles = 2;    // head tiles that an item of the keys' kind contracts
// The order in which the blocks of a key tile are used and come free: both warpgroups own one half
// of the value columns. The ninth block is the first one's, too.
__host__ __device__ constexpr int block_order(int i) { return i == 8 ? 8 : i % 2 * 4 + i / 2; }

// The counters start with the next ticket, in 16 bytes of its own.
inline constexpr int kTicketWords = 4;

// A row of queries' counters; all zero when the kernel starts.
struct BwdCounters {
  uint32_t written;  // warps that have stored their P and dS of an item
  uint32_t read;     // items of the keys' kind that have read them
};

// Sizes of the work, the same for launcher and kernel. A "row" is a query and group of keys.
struct BwdWork {
  int64_t rows;
  int head_tiles;  // of a group
  int pairs;       // of them, ceil
  int slot_tiles;  // at most, of a row
  int lag;         // rows that the second kind of item follows behind the first
  int ring;        // rows whose P and dS have room at the same time

  __host__ __device__ explicit BwdWork(const SparseMlaBwdParams& p)
      : rows(p.batch * p.queries * p.groups),
        head_tiles(ceil_div(p.heads / p.groups, kHeads)),
        pairs(ceil_div(head_tiles, kKeyTiles)),
        slot_tiles(ceil_div(p.slots, kTile)) {
    const int64_t round = ceil_div(p.tickets_behind, per_row());
    lag = static_cast<int>(rows < round ? rows : round);
    ring = 2 * lag;
  }
  __host__ __device__ int keys_items() const { return pairs * 2; }
  __host__ __device__ int per_row() const { return head_tiles + keys_items(); }
  __host__ __device__ int64_t tickets() const { return rows * per_row(); }
  __host__ __device__ int64_t image_blocks() const {
    return int64_t{ring} * head_tiles * slot_tiles * kTileImages;
  }
};

// One piece of work: of the queries' kind (P, dS and dQ of 64 heads), or of the keys' kind (dKV of
// two head tiles, half of the columns).
struct BwdItem {
  bool keys;
  int64_t row;
  int part;  // head tile; or 2 * pair + half

  // Rows start with their first kind, and `lag` rows later follows the second.
  __device__ BwdItem(const BwdWork& work, int64_t ticket) {
    const int64_t ramp = int64_t{work.lag} * work.head_tiles;
    if (ticket < ramp) {
      keys = false;
      row = ticket / work.head_tiles;
      part = static_cast<int>(ticket % work.head_tiles);
      return;
    }
    ticket -= ramp;
    const int64_t both = work.rows - work.lag;
    if (ticket < both * work.per_row()) {
      row = ticket / work.per_row();
      part = static_cast<int>(ticket % work.per_row());
      keys = part >= work.head_tiles;
      if (keys) {
        part -= work.head_tiles;
      } else {
        row += work.lag;
      }
      return;
    }
    ticket -= both * work.per_row();
    keys = true;
    row = both + ticket / work.keys_items();
    part = static_cast<int>(ticket % work.keys_items());
  }
};

__device__ inline BwdCounters* bwd_counters(const SparseMlaBwdParams& p) {
  return reinterpret_cast<BwdCounters*>(static_cast<uint32_t*>(p.counters) + kTicketWords);
}

// Where a row's P and dS of a head tile begin.
__device__ inline char* image(const SparseMlaBwdParams& p, const BwdWork& work, int64_t row,
                              int head_tile) {
  const int64_t at = row % work.ring * work.head_tiles + head_tile;
  return static_cast<char*>(p.images) + at * work.slot_tiles * kTileImages * kBlockBytes;
}

// Heads of one group and their rows in [batch, queries, heads, ...].
struct HeadTile {
  int64_t first;  // row of the first head
  int heads;      // at most 64

  __device__ HeadTile(const SparseMlaBwdParams& p, int64_t row, int tile) {
    const int per_group = p.heads / p.groups;
    first = row / p.groups * p.heads + row % p.groups * per_group + tile * kHeads;
    heads = min(per_group - tile * kHeads, kHeads);
  }
};

// The indices of one row of queries.
__device__ inline Slots slots_of(const SparseMlaBwdParams& p, int64_t row) {
  return Slots(p, row / p.groups, static_cast<int>(row % p.groups));
}

template <int kD>
struct alignas(1024) BwdShared {
  static constexpr int kBlocks = kD / 64;

  struct Queries {
    uint8_t q[kBlocks][kBlockBytes];
    uint8_t dout[8][kBlockBytes];
    uint8_t keys[kBlocks][kBlockBytes];
    uint8_t p[kBlockBytes];   // of the tile at hand, rows are heads
    uint8_t ds[kBlockBytes];  // and dS
  };
  struct Keys {
    uint8_t q[kKeyTiles][5][kBlockBytes];  // half of the value columns; the ninth block
    uint8_t dout[kKeyTiles][4][kBlockBytes];
    uint8_t images[2][kKeyTiles][kTileImages][kBlockBytes];  // by warpgroup
    uint8_t stage[8][1024];                                  // each warp's, for its sums
  };
  union {
    Queries queries;
    Keys keys;
  };
  uint8_t valid[kTile / 8];  // bit r % 8 of [r / 8]: key row r of the tile counts
  int ticket;
  int tiles;           // of slots, of the item
  uint64_t rows_full;  // Q and dO of the item are here
  uint64_t block_full[kBlocks], block_free[kBlocks];
  uint64_t image_full[2], image_free[2];  // by warpgroup
  uint64_t item_done, ticket_full;
};

// Named barriers of one warp of each of the first two warpgroups, whose number is to be added; 0 is
// __syncthreads.
enum BwdBarrier { kProbabilitiesReady = 1, kGradientsReady = 5 };

}  // namespace jax_dsa::sparse_mla
