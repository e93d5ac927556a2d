// Work tiles, workspaces and shared memory of the sparse MLA backward kernel. See bwd.cuh.
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

inline constexpr int kPdsBlocks = 2;          // blocks per head tile and key tile: P and dS
inline constexpr int kDkvHeadTiles = 2;       // head tiles that a dKV tile sums over
inline constexpr int kOrderSlots = 8192;      // queries with more slots do not share sums
inline constexpr int kMinPartitionTiles = 8;  // fewest key tiles of a step in a KV partition
inline constexpr int kHeadsPerMaskBit = 8;    // heads of packed queries that share a mask bit
inline constexpr int kHeadMaskBits = kHeads / kHeadsPerMaskBit;
// The order in which a key tile's blocks are used and become free. The first warpgroup frees the
// blocks from 6 on, the second one frees the others.
__host__ __device__ constexpr int block_order(int i) {
  return i < 2 || i == 8 ? i : i < 4 ? i + 4 : i - 2;
}

// The counters start with the next tile index, which has 16 bytes of its own.
inline constexpr int kTileIndexWords = 4;

// The counters of a step. The launcher clears all of them before the kernel starts.
struct BwdCounters {
  uint32_t written;  // warps that have stored their P and dS of a head tile
  uint32_t read;     // dKV tiles that have read the P and dS tiles
};

// The distance, in tile indices, between the dQ tile that writes P and dS and the dKV tile that
// reads them. With less than two per resident CTA, readers stall. With more, only the workspace
// grows, whose size is fixed before the device is known.
inline int lag_work_tiles(const Device& device) { return 2 * std::min(device.num_sms, kMaxSms); }
// The bytes of dkv that one KV partition should cover. 20 MiB are best on an H200, whose L2 of 60
// MiB must also keep P and dS. On smaller L2s the partition may take two fifths, which are the same
// 20 MiB on an H100 (50 MiB).
inline int64_t partition_bytes(const Device& device) {
  return std::min(int64_t{20} << 20, std::max<int64_t>(device.l2_bytes * 2 / 5, 1));
}
inline constexpr Device kLargestDevice = {kMaxSms, int64_t{60} << 20};

// The sizes of the work. bwd.cuh explains the words.
struct BwdWork {
  int64_t rows;
  int64_t work_tiles;
  int steps;
  int head_tiles;       // of a row
  int rows_per_step;    // 2 if a row has one head tile, else 1
  int head_tile_pairs;  // pairs of head tiles in a step, rounded up
  int key_tiles;        // of a row whose slots are all valid
  int partitions;       // KV partitions of a step
  int lag;              // steps between a dQ tile and the dKV tiles of its scheduling group
  int ring;             // steps whose P and dS tiles fit in the workspace

  explicit BwdWork(const SparseMlaBwdParams& p, const Device& device = kLargestDevice)
      : rows(p.queries_at_once * p.groups),
        head_tiles(std::max(1, ceil_div(p.heads / p.groups, kHeads))),
        rows_per_step(head_tiles == 1 ? 2 : 1),
        head_tile_pairs(ceil_div(step_head_tiles(), kDkvHeadTiles)),
        key_tiles(ceil_div(p.slots, kTile)) {
    const int64_t steps = ceil_div(rows, int64_t{rows_per_step});
    const int max_partitions = std::max(1, rows_per_step * key_tiles / kMinPartitionTiles);
    const int64_t wanted_partitions =
        ceil_div(p.keys * p.groups * p.dim * 4, partition_bytes(device));
    partitions =
        p.by_rows ? 1 : static_cast<int>(std::clamp<int64_t>(wanted_partitions, 1, max_partitions));
    work_tiles = steps * work_tiles_per_step();
    this->steps = static_cast<int>(steps);
    const int64_t lag_steps =
        ceil_div(lag_work_tiles(device), step_head_tiles() + dkv_tiles_per_partition());
    lag = static_cast<int>(std::min(steps, lag_steps));
    ring = 2 * lag;
  }
  __host__ __device__ int step_head_tiles() const { return rows_per_step * head_tiles; }
  __host__ __device__ int dkv_tiles_per_partition() const { return head_tile_pairs * 2; }
  __host__ __device__ int dkv_tiles_per_step() const {
    return partitions * dkv_tiles_per_partition();
  }
  __host__ __device__ int work_tiles_per_step() const {
    return step_head_tiles() + dkv_tiles_per_step();
  }
  // Returns how many rows are stored for a slot, each of which sums over up to 128 heads.
  __host__ __device__ int stored_rows_per_slot() const {
    return ceil_div(head_tiles, kDkvHeadTiles);
  }
  int64_t p_ds_blocks() const { return int64_t{ring} * step_head_tiles() * key_tiles * kPdsBlocks; }
  // Returns whether the two rows of a step share the sums of their common keys, which requires that
  // their slots are put in a common order.
  bool shares_sums(const SparseMlaBwdParams& p) const {
    return rows_per_step == 2 && rows > 1 && p.groups == 1 && p.slots <= kOrderSlots && !p.by_rows;
  }
};

struct BwdWorkTile {
  bool over;    // there is no such work tile, so the CTA is done
  bool is_dkv;  // whether it is a dKV tile or a dQ tile
  int step;
  int within_step;  // dQ tile: the head tile; dKV tile: 2 * pair of head tiles + half of the
                    // columns
  int partition;    // of a dKV tile

  // The dQ tiles of the first `lag` steps come first, then the scheduling groups. The dKV tiles of
  // `lag` consecutive steps are ordered by partition: the first partition of each of these steps,
  // then the next partition of each, and so on.
  __device__ BwdWorkTile(const BwdWork& work, unsigned tile_index)
      : over(tile_index >= work.work_tiles), is_dkv(false), step(0), within_step(0), partition(0) {
    if (over) return;
    const unsigned step_head_tiles = work.step_head_tiles(), prologue = work.lag * step_head_tiles;
    if (tile_index < prologue) {
      step = tile_index / step_head_tiles;
      within_step = tile_index % step_head_tiles;
      return;
    }
    tile_index -= prologue;
    // The last scheduling groups consist of dKV tiles only.
    const unsigned full_groups = work.steps - work.lag,
                   in_full_groups = full_groups * work.work_tiles_per_step();
    const unsigned rest = tile_index - min(tile_index, in_full_groups);
    tile_index -= rest;
    const unsigned group =
        tile_index / work.work_tiles_per_step() + rest / work.dkv_tiles_per_step();
    unsigned offset = tile_index % work.work_tiles_per_step() + rest % work.dkv_tiles_per_step();
    if (group < full_groups && offset < step_head_tiles) {
      step = group + work.lag;
      within_step = offset;
      return;
    }
    is_dkv = true;
    if (group < full_groups) offset -= step_head_tiles;
    const unsigned first = group / work.lag * work.lag, steps = min(work.lag, work.steps - first);
    offset += (group - first) * work.dkv_tiles_per_step();
    partition = offset / (steps * work.dkv_tiles_per_partition());
    offset %= steps * work.dkv_tiles_per_partition();
    step = first + offset / work.dkv_tiles_per_partition();
    within_step = offset % work.dkv_tiles_per_partition();
  }
};

inline int64_t counter_bytes(const BwdWork& work) {
  return kTileIndexWords * 4 + work.steps * int64_t{sizeof(BwdCounters)};
}
__device__ inline BwdCounters* bwd_counters(const SparseMlaBwdParams& p) {
  return reinterpret_cast<BwdCounters*>(static_cast<uint32_t*>(p.counters) + kTileIndexWords);
}

// Returns where the P and dS tiles of a head tile of a step begin.
__device__ inline char* p_ds_tiles(const SparseMlaBwdParams& p, const BwdWork& work, int step,
                                   int head_tile) {
  const int64_t at = step % work.ring * work.step_head_tiles() + head_tile;
  return static_cast<char*>(p.p_ds) + at * work.key_tiles * kPdsBlocks * kBlockBytes;
}

// A head tile of a step: heads of one row, with their position in [batch, queries, heads, ...].
struct HeadTile {
  int row, group;
  int64_t token;  // batch * queries + query
  int64_t first;  // position of the first head
  int heads;      // at most 64; 0 if there is no such row

  __device__ HeadTile(const SparseMlaBwdParams& p, const BwdWork& work, int step, int head_tile) {
    const int per_group = p.heads / p.groups, tile = head_tile % work.head_tiles;
    row = step * work.rows_per_step + head_tile / work.head_tiles;
    const bool exists = row < work.rows;
    if (!exists) --row;
    token = p.first_query + row / p.groups, group = row % p.groups;
    first = token * p.heads + group * per_group + tile * kHeads;
    heads = exists ? min(per_group - tile * kHeads, kHeads) : 0;
  }
  __device__ int64_t batch(const SparseMlaBwdParams& p) const {
    return static_cast<int>(token) / static_cast<int>(p.queries);
  }
  // Below the index of a packed slot there are `head_mask_bits` mask bits. Shifting the limit by as
  // many bits gives the same comparison, so that the index need not be shifted.
  __device__ Slots slots(const SparseMlaBwdParams& p) const {
    Slots slots(p, token, group);
    slots.limit <<= p.head_mask_bits;
    return slots;
  }
  // Returns the number of key tiles. All lanes of a warp must call it.
  __device__ int tiles(const SparseMlaBwdParams& p, int lane) const {
    return heads > 0 ? count_tiles(slots(p), lane) : 0;
  }
};

// If rows share sums, `order` holds the reordered indices, and after them for each step the number
// of key tiles that its two rows have in common.
inline int64_t order_words(const SparseMlaBwdParams& p, const BwdWork& work) {
  return work.shares_sums(p) ? work.rows * p.slots + work.steps : 0;
}
__device__ inline int32_t* common_tiles(const SparseMlaBwdParams& p, const BwdWork& work) {
  return p.order + work.rows * p.slots;
}

// The key tiles of a dKV tile. Its one or two head tiles belong to the same row, and then have all
// key tiles in common, or to two rows, which have the first key tiles in common. So there are three
// ranges: common key tiles, further ones of the first row, and further ones of the second row.
struct KeyTileList {
  struct Row {
    int tiles;
    Slots slots;
    int64_t dkv;         // where the gradient of key 0 begins, in elements
    int64_t stored_row;  // by rows: the stored row of slot 0
  };
  int head_tiles;
  int end[3];     // of each range, in this list
  int offset[3];  // what to add to a position in this list to get the key tile
  Row rows[2];

  // Takes from each range the key tiles of KV partition `partition` of `partitions`.
  __device__ KeyTileList(int head_tiles, const Row& first, const Row& second, int common,
                         int partition, int partitions)
      : head_tiles(head_tiles), rows{first, second} {
    const int limits[3][2] = {{0, common}, {common, first.tiles}, {common, second.tiles}};
    int count = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int size = limits[i][1] - limits[i][0], begin = size * partition / partitions;
      offset[i] = limits[i][0] + begin - count;
      count += size * (partition + 1) / partitions - begin;
      end[i] = count;
    }
  }
  __device__ int tiles() const { return end[2]; }
  // Position n is key tile `*tile`, for `*head_tile_count` head tiles from `*first_head_tile` on.
  __device__ void find(int n, int* tile, int* first_head_tile, int* head_tile_count) const {
    const int range = (n >= end[0]) + (n >= end[1]);
    *first_head_tile = range / 2;
    *head_tile_count = range == 0 ? head_tiles : 1;
    *tile = n + offset[range];
  }
};

template <int kD>
struct alignas(1024) BwdShared {
  static constexpr int kBlocks = kD / 64;

  struct Dq {
    uint8_t operand[kBlocks + 8][kBlockBytes];  // blocks of q and dout alternate; then q's ninth
    uint8_t keys[kBlocks][kBlockBytes];
    uint8_t p[kBlockBytes];  // of the current key tile; rows are slots
    uint8_t ds[kBlockBytes];
    float2 head_stats[kHeads];  // lse in log2 units, delta. If `exact`, log_sum in place of lse
    float max_logit[kHeads];    // defined if `exact`
    int exact;                  // whether a maximum exceeds kExactBaseLimit
    uint8_t head_mask[kTile];   // per slot of the key tile; a bit for every 8 heads
  };
  struct Dkv {
    uint8_t q[kDkvHeadTiles][4][kBlockBytes];  // one half of the value columns
    uint8_t dout[kDkvHeadTiles][4][kBlockBytes];
    uint8_t ninth[kDkvHeadTiles][kBlockBytes];                // q's ninth block
    uint8_t p_ds[2][kDkvHeadTiles][kPdsBlocks][kBlockBytes];  // by warpgroup, head tile, P or dS
    uint8_t staging[8][1024];                                 // by warp, for stored rows
  };
  union {
    Dq dq;
    Dkv dkv;
  };
  // The q and dout of a dKV tile overlap only the q and dout of a preceding dQ tile, so their
  // copies may start as soon as `operand_free` is complete.
  static_assert(offsetof(Dkv, ninth) <= offsetof(Dq, keys));
  ValidRows valid;           // of the current key tile
  BwdWorkTile work_tile[2];  // the current and the next work tile
  int tiles;                 // dQ tile: its key tiles
  KeyTileList list;          // dKV tile: its key tiles
  uint64_t rows_full;        // q and dout of the work tile are in shared memory
  uint64_t block_full[kBlocks], block_free[kBlocks];
  uint64_t p_ds_full[2], p_ds_free[2];  // by warpgroup
  uint64_t work_tile_done;              // the consumer warps are ready for the next work tile
  // Two barriers alternate, because a warp may not yet have observed one work tile when the next
  // one arrives.
  uint64_t work_tile_full[2];
  uint64_t operand_free;  // q and dout of a dQ tile have been read
};

// Named barriers. Barrier 0 is __syncthreads.
enum BwdBarrier {
  kHeadStatsReady = 1,  // within the first warpgroup: what the heads need is in shared memory
  kDsReady,             // the first warpgroup has stored dS, for which the second one waits
  kFirstBlocksFree,  // the second warpgroup has freed blocks 0 and 1, for which the first one waits
  kDsRead,           // the first warpgroup has read dS, for which the second one waits
  kWorkTileTaken,    // within the producer warpgroup: all warps have read the work tile
};

}  // namespace jax_dsa::sparse_mla
