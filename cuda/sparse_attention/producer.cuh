// The producer warpgroup of the kernels that walk over the union of the lists of a tile of queries.
// A step is a tile of kKeys keys: a part of one block, or several blocks.
#pragma once

#include "common/tma.cuh"
#include "masked_attention/fwd_producer.cuh"
#include "sparse_attention/lists.cuh"
#include "sparse_attention/rows.cuh"

namespace jax_dsa::sparse_attention {

using masked_attention::kMaskWarps;
using masked_attention::QueuedTile;

// The steps of a work tile.
template <int kKeys>
struct Steps {
  const int32_t* rows;
  const uint32_t* queries;
  int entries;
  int block_size;
  int words;

  __device__ Steps(const TileLists& lists, int groups, int block_size, const WorkTile& x)
      : block_size(block_size), words(lists.words) {
    const int64_t index = (int64_t{x.batch} * groups + x.head) * lists.tiles +
                          x.query / lists.tile_queries;
    rows = lists.rows + index * lists.capacity;
    queries = lists.queries + index * lists.capacity * lists.words;
    entries = __ldg(lists.counts + index);
  }
  __device__ int64_t keys() const { return int64_t{entries} * block_size; }
  // The number of keys that lie together in memory, and how many such boxes a step has.
  __device__ int box_keys() const { return min(block_size, kKeys); }
  __device__ int boxes() const { return kKeys / box_keys(); }
  // The entry of box i of the step that starts at key `key` of the union.
  __device__ int entry(int64_t key, int box) const {
    return static_cast<int>((key + box * box_keys()) / block_size);
  }
  // Returns the row of k of a box, or `none` after the last entry.
  __device__ int row(int64_t key, int box, int none) const {
    const int at = entry(key, box);
    return at < entries ? __ldg(rows + at) + static_cast<int>(key % block_size) : none;
  }
};

// Scheduler warp: fetches work tiles and pushes their steps to the queue. `QueuedTile::key` counts
// the keys of the union.
template <typename Tr, typename Params, typename Shared>
__device__ void schedule_steps(const Params& p, const masked_attention::TileScheduler& scheduler,
                               const TileLists& lists, unsigned* tile_counter, Shared& shared) {
  const int lane = threadIdx.x % 32;
  RingPlace<Tr::kQueued> place = {0, 1};
  const auto push = [&](const QueuedTile& x, const Steps<Tr::kKeys>* steps) {
    mbarrier_wait(&shared.tile_released[place.index], place.parity);
    if (steps) {
      for (int i = lane; i < steps->boxes(); i += 32) {
        shared.rows[place.index][i] = steps->row(x.key, i, static_cast<int>(p.keys));
      }
    }
    if (lane == 0) shared.queue[place.index] = x;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.tile_queued[place.index]);
    place.advance();
  };
  for (;;) {
    unsigned index = 0;
    if (lane == 0) index = atomicAdd(tile_counter, 1u);
    WorkTile x = scheduler.work_tile(__shfl_sync(~0u, index, 0));
    if (x.done) {
      for (int i = 0; i < kMaskWarps; ++i) push({x, 0, 0, false, true, true}, nullptr);
      return;
    }
    const Steps<Tr::kKeys> steps(lists, p.groups, p.lists.block_size, x);
    const int keys = static_cast<int>(steps.keys());
    x.nonempty = keys > 0;
    if (!x.nonempty) push({x, 0, 0, false, true, true}, nullptr);
    for (int key = 0; key < keys; key += Tr::kKeys) {
      push({x, 0, key, true, key == 0, key + Tr::kKeys >= keys}, &steps);
    }
  }
}

// Issues the TMA loads. All lanes of the load warp call the methods.
template <typename Tr, typename Params, typename Shared>
struct BlockLoader {
  const Params& p;
  const CUtensorMap &q_map, &k_map, &v_map;
  Shared& shared;

  __device__ uint32_t query_bytes() const {
    return Tr::kDBlocks * p.tile_queries * (p.heads / p.groups) * 128;
  }
  __device__ void load_queries(const WorkTile& x) const {
    load_query_rows(shared.q, q_map, shared.q_full, x);
  }
  __device__ void load_keys(const QueuedTile& x, int slot, int at) const {
    load_boxes(shared.k[at], k_map, shared.k_full[at], x, slot);
  }
  __device__ void load_values(const QueuedTile& x, int slot, int at) const {
    load_boxes(shared.v[at], v_map, shared.v_full[at], x, slot);
  }

  template <int kBlocks, int kBytes>
  __device__ void load_query_rows(uint8_t (&to)[kBlocks][kBytes], const CUtensorMap& map,
                                  uint64_t& full, const WorkTile& x) const {
    if (threadIdx.x % 32 != 0) return;
    const int token = static_cast<int>(int64_t{x.batch} * p.queries + x.query);
    for (int block = 0; block < kBlocks; ++block) {
      tma_load(to[block], &map, &full, block * 64, 0, x.head, token);
    }
  }
  template <int kBlocks>
  __device__ void load_boxes(uint8_t (&to)[kBlocks][Tr::kKeyBlockBytes], const CUtensorMap& map,
                             uint64_t& full, const QueuedTile& x, int slot) const {
    __syncwarp();
    const int box_keys = min(p.lists.block_size, Tr::kKeys), boxes = Tr::kKeys / box_keys;
    for (int i = threadIdx.x % 32; i < boxes * kBlocks; i += 32) {
      const int box = i / kBlocks, block = i - box * kBlocks;
      tma_load(to[block] + box * box_keys * 128, &map, &full, block * 64, x.work_tile.head,
               shared.rows[slot][box], x.work_tile.batch);
    }
    __syncwarp();
  }
};

// Mask warps: build the bits of each query of a step, and find the keys that no query sees. The two
// warps alternate between queue slots.
template <typename Tr, typename Params, typename Shared>
__device__ void build_query_bits(const Params& p, const TileLists& lists, Shared& shared,
                                 int warp) {
  constexpr int kWords = Tr::kKeys / 32;
  const int lane = threadIdx.x % 32;
  for (RingPlace<Tr::kQueued> place = {warp, 0};; place = place + kMaskWarps) {
    const int at = place.index;
    mbarrier_wait(&shared.tile_queued[at], place.parity);
    const QueuedTile x = shared.queue[at];
    const WorkTile& work_tile = x.work_tile;
    if (work_tile.done) return;
    if (work_tile.nonempty) {
      const Steps<Tr::kKeys> steps(lists, p.groups, p.lists.block_size, work_tile);
      const int word_boxes = max(1, 32 / steps.block_size);
      uint32_t unseen[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) unseen[w] = ~0u;
      for (int first = 0; first < lists.tile_queries; first += 32) {
        const int64_t query = work_tile.query + first + lane;
        const int end = first + lane < lists.tile_queries && query < p.queries
                            ? key_end(p.lists, work_tile.batch * p.queries + query, p.keys)
                            : 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          // Lane i holds the queries that see box i of this word.
          uint32_t sees = 0;
          int row = 0;
          if (lane < word_boxes) {
            const int entry = steps.entry(x.key + 32 * w, 0) + lane;
            const int box = 32 * w / steps.box_keys() + lane;
            if (entry < steps.entries) {
              sees = __ldg(steps.queries + int64_t{entry} * steps.words + first / 32);
              row = shared.rows[at][box] + 32 * w % steps.box_keys();
            }
          }
          uint32_t bits = 0;
          for (int i = 0; i < word_boxes; ++i) {
            const uint32_t by = __shfl_sync(~0u, sees, i);
            const int keys = end - __shfl_sync(~0u, row, i);
            if (!(by >> lane & 1)) continue;
            const int width = 32 / word_boxes;
            bits |= masked_attention::low_bits(min(keys, width)) << i * width % 32;
          }
          shared.bits[at][first + lane][w] = bits;
          unseen[w] &= ~__reduce_or_sync(~0u, bits);
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (lane == w) shared.unseen[at][w] = unseen[w];
      }
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.bits_built[at]);
      mbarrier_arrive(&shared.tile_released[at]);
    }
  }
}

}  // namespace jax_dsa::sparse_attention
