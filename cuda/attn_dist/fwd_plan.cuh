// Head tiles, work tiles and shared memory of the attn_dist kernel. See fwd.cuh.
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
inline constexpr int kFirstBlocks = 5;  // blocks of a tile that have a barrier of their own

// Barrier 0 is __syncthreads.
enum NamedBarrier {
  kPingPong = 1,  // barrier kPingPong + i: warpgroup i may issue its MMAs
  kSummed = 3,    // barrier kSummed + i: the warps' sums of warpgroup i are in shared memory
  kJoined = 5,    // barrier kJoined + i: both warpgroups' sums are in buffer i of shared memory
};

template <int kD>
struct alignas(1024) Shared {
  uint8_t tiles[kStages][kD / 64][kBlockBytes];
  float sums[2][8][kTile];  // by buffer and warp; each is over the warp's 16 heads
  // For each MMA thread: what to subtract from the scores of its two rows if a row of the warp
  // exceeds kExactBaseLimit, and whether one does.
  float2 base[256];
  bool exact[256];
  ValidRows valid[kStages];
  int key_tiles[kStages];     // for stages with a head tile: how many key tiles follow
  uint64_t full[kStages][2];  // [0]: the first kFirstBlocks blocks; [1]: all blocks
  uint64_t free[kStages];
};

// Returns whether the kernels accept the parameters.
inline bool is_valid(const AttnDistFwdParams& p) {
  return p.groups > 0 && p.heads % p.groups == 0 && p.head_group > 0 &&
         p.heads / p.groups % p.head_group == 0 &&
         (p.dim == 576 || p.dim == 512 || (p.dim >= 64 && p.dim <= 256 && p.dim % 64 == 0));
}

// How the heads of one KV head group are divided into head tiles and work tiles.
struct Layout {
  int sums;          // sums per KV head group
  int rows_per_sum;  // rows of a head tile for one sum: 16, 32 or 64, of which some may be empty
  int head_tiles;    // head tiles per work tile
  int work_tiles;    // work tiles per query and KV head group
  bool joint;        // one sum takes several head tiles

  __host__ __device__ explicit Layout(const AttnDistFwdParams& p) {
    sums = p.heads / p.groups / p.head_group;
    rows_per_sum = p.head_group <= 16 ? 16 : p.head_group <= 32 ? 32 : kHeads;
    joint = p.head_group > kHeads;
    head_tiles =
        joint ? ceil_div(p.head_group, 2 * kHeads) * 2 : ceil_div(sums, kHeads / rows_per_sum);
    work_tiles = joint ? sums : 1;
  }
};

__host__ __device__ inline int64_t work_tile_count(const AttnDistFwdParams& p) {
  return p.batch * p.queries * p.groups * Layout(p).work_tiles;
}

// The KV splits that a CTA processes: each is the key tiles first..last of a work tile. As long as
// there is one for every CTA, CTAs take whole work tiles. The key tiles of the remaining work
// tiles, end to end, are divided into equal work ranges.
struct KvSplits {
  int work_index;
  int first, last;

  __device__ explicit KvSplits(const AttnDistFwdParams& p) : key_tiles(ceil_div(p.slots, kTile)) {
    const int work_tiles = static_cast<int>(work_tile_count(p)), ctas = gridDim.x, cta = blockIdx.x;
    whole = work_tiles / ctas;
    const int64_t rest = int64_t{work_tiles - whole * ctas} * key_tiles;
    begin = rest * cta / ctas;
    end = rest * (cta + 1) / ctas;
  }

  __device__ bool next() {
    if (round < whole) {
      work_index = blockIdx.x + round * gridDim.x;
      first = 0, last = key_tiles;
      ++round;
      return true;
    }
    if (begin == end) return false;
    work_index = whole * gridDim.x + static_cast<int>(begin / key_tiles);
    first = static_cast<int>(begin % key_tiles);
    last = static_cast<int>(min(int64_t{key_tiles}, first + end - begin));
    begin += last - first;
    return true;
  }

 private:
  int key_tiles;         // key tiles per work tile
  int whole, round = 0;  // whole work tiles per CTA, and how many of them were taken
  int64_t begin, end;    // this CTA's work range
};

struct WorkTile {
  int64_t token;  // batch * queries + query
  int64_t query;
  int batch, group, sum;  // its first sum, among those of the KV head group

  __device__ WorkTile(const AttnDistFwdParams& p, const Layout& layout, int work_index) {
    int rest = work_index / layout.work_tiles;
    sum = work_index - rest * layout.work_tiles;
    token = rest / p.groups;
    group = rest - static_cast<int>(token) * p.groups;
    batch = static_cast<int>(token) / static_cast<int>(p.queries);
    query = token - batch * p.queries;
  }
};

// Head tile `index` of a work tile.
struct HeadTile {
  int first;  // first head
  int sum;    // first sum, among those of all heads
  int sums;
  int used;  // rows per sum that hold a head

  __device__ HeadTile(const AttnDistFwdParams& p, const Layout& layout, const WorkTile& work_tile,
                      int index) {
    const int before = layout.joint ? work_tile.sum : index * (kHeads / layout.rows_per_sum);
    sum = work_tile.group * layout.sums + before;
    first = sum * p.head_group + (layout.joint ? index * kHeads : 0);
    sums = layout.joint ? 1 : min(kHeads / layout.rows_per_sum, layout.sums - before);
    used = layout.joint ? p.head_group - index * kHeads : p.head_group;
  }

  // Returns the head of a row, or -1 if the row is empty.
  __device__ int head(const AttnDistFwdParams& p, const Layout& layout, int row) const {
    const int i = row / layout.rows_per_sum, local = row - i * layout.rows_per_sum;
    return i < sums && local < used ? first + i * p.head_group + local : -1;
  }
};

}  // namespace jax_dsa::attn_dist
