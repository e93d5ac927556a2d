// What the warpgroups of the attn_dist kernel share: how heads make tiles, the work items, the ring
// in shared memory. See fwd.cuh.
#pragma once

#include <cstdint>

#include "attn_dist/attn_dist.h"
#include "common/gather.cuh"
#include "common/ring.cuh"
#include "common/tile.cuh"
#include "common/types.h"

namespace jax_dsa::attn_dist {

inline constexpr int kThreads = 384;  // three warpgroups
inline constexpr int kHeads = 64;     // rows of a head tile
inline constexpr int kStages = 3;
inline constexpr int kFirstPart = 5;  // blocks of a tile that are waited for before the others

// 0 is __syncthreads.
enum NamedBarrier {
  kTurn = 1,    // warpgroup kTurn + i may issue its products
  kSummed = 3,  // the warps' sums of warpgroup i are in shared memory
  kJoined = 5,  // ... of both warpgroups, in buffer i
};

template <int kD>
struct alignas(1024) Shared {
  uint8_t tiles[kStages][kD / 64][kBlockBytes];
  float sums[2][8][kTile];  // by buffer and warp: of the warp's 16 heads
  ValidRows valid[kStages];
  int key_tiles[kStages];     // with head tiles: how many key tiles follow
  uint64_t full[kStages][2];  // the first part; all
  uint64_t free[kStages];
};

// How the heads of one group of keys make head tiles and work items.
struct Layout {
  int sums;  // of the heads of a group of keys
  int rows;  // of a head tile that one sum has, 16, 32 or 64; what exceeds the sum's heads is empty
  int tiles;   // of an item
  int items;   // of a group of keys
  bool joint;  // the sum takes more than one head tile

  __host__ __device__ explicit Layout(const AttnDistFwdParams& p) {
    sums = p.heads / p.groups / p.head_group;
    rows = p.head_group <= 16 ? 16 : p.head_group <= 32 ? 32 : kHeads;
    joint = p.head_group > kHeads;
    tiles = joint ? ceil_div(p.head_group, 2 * kHeads) * 2 : ceil_div(sums, kHeads / rows);
    items = joint ? sums : 1;
  }
};

__host__ __device__ inline int64_t item_count(const AttnDistFwdParams& p) {
  return p.batch * p.queries * p.groups * Layout(p).items;
}

// What a block does, one piece after the other: key tiles first..last of a work item. Items are
// dealt out whole as long as there is one for every block; the rest is cut into equal shares.
struct Pieces {
  int number;  // of the item
  int first, last;

  __device__ explicit Pieces(const AttnDistFwdParams& p) : per_item(ceil_div(p.slots, kTile)) {
    const int items = static_cast<int>(item_count(p)), blocks = gridDim.x, block = blockIdx.x;
    whole = items / blocks;
    const int64_t rest = int64_t{items - whole * blocks} * per_item;
    begin = rest * block / blocks;
    end = rest * (block + 1) / blocks;
  }

  __device__ bool next() {
    if (round < whole) {
      number = blockIdx.x + round * gridDim.x;
      first = 0, last = per_item;
      ++round;
      return true;
    }
    if (begin == end) return false;
    number = whole * gridDim.x + static_cast<int>(begin / per_item);
    first = static_cast<int>(begin % per_item);
    last = static_cast<int>(min(int64_t{per_item}, first + end - begin));
    begin += last - first;
    return true;
  }

 private:
  int per_item, whole, round = 0;
  int64_t begin, end;  // of this block's share of the rest
};

struct Item {
  int64_t token;  // batch * queries + query
  int64_t query;
  int batch, group, sum;  // the first of its sums among those of the group of keys

  __device__ Item(const AttnDistFwdParams& p, const Layout& layout, int number) {
    int rest = number / layout.items;
    sum = number - rest * layout.items;
    token = rest / p.groups;
    group = rest - static_cast<int>(token) * p.groups;
    batch = static_cast<int>(token) / static_cast<int>(p.queries);
    query = token - batch * p.queries;
  }
};

// Tile `index` of an item's heads.
struct HeadTile {
  int first;  // head
  int sum;    // the first of its sums among all
  int sums;
  int used;  // of a sum's rows

  __device__ HeadTile(const AttnDistFwdParams& p, const Layout& layout, const Item& item,
                      int index) {
    const int before = layout.joint ? item.sum : index * (kHeads / layout.rows);
    sum = item.group * layout.sums + before;
    first = sum * p.head_group + (layout.joint ? index * kHeads : 0);
    sums = layout.joint ? 1 : min(kHeads / layout.rows, layout.sums - before);
    used = layout.joint ? p.head_group - index * kHeads : p.head_group;
  }

  // The head of a row, or -1.
  __device__ int head(const AttnDistFwdParams& p, const Layout& layout, int row) const {
    const int i = row / layout.rows, local = row - i * layout.rows;
    return i < sums && local < used ? first + i * p.head_group + local : -1;
  }
};

}  // namespace jax_dsa::attn_dist
