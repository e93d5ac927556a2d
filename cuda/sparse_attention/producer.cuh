// The producer warpgroup of the kernels that walk over the union of the lists of a tile of queries.
#pragma once

#include "common/tma.cuh"
#include "masked_attention/fwd_producer.cuh"
#include "sparse_attention/rows.cuh"
#include "sparse_attention/steps.cuh"

namespace jax_dsa::sparse_attention {

using masked_attention::kMaskWarps;
using masked_attention::QueuedTile;

// Scheduler warp: fetches work tiles and pushes their steps to the queue. `QueuedTile::key` counts
// the keys of the union.
template <typename Tr, typename Params>
__device__ void schedule_steps(const Params& p, const masked_attention::TileScheduler& scheduler,
                               const TileLists& lists, unsigned* tile_counter,
                               masked_attention::Shared<Tr>& shared) {
  const int lane = threadIdx.x % 32;
  RingPlace<Tr::kQueued> place = {0, 1};
  Steps<Tr::kKeys> steps(p.lists.block_size);
  const auto push = [&](const QueuedTile& x) {
    mbarrier_wait(&shared.tile_released[place.index], place.parity);
    if (x.work_tile.nonempty) {
      for (int i = lane; i < steps.boxes(); i += 32) {
        shared.extra.rows[place.index][i] = steps.row(x.key, i, static_cast<int>(p.keys));
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
      for (int i = 0; i < kMaskWarps; ++i) push({x, 0, 0, false, true, true});
      return;
    }
    steps.start(lists, p.groups, x);
    const int keys = steps.keys();
    x.nonempty = keys > 0;
    if (!x.nonempty) push({x, 0, 0, false, true, true});
    for (int key = 0; key < keys; key += Tr::kKeys) {
      push({x, 0, key, true, key == 0, key + Tr::kKeys >= keys});
    }
  }
}

// Issues the TMA loads. All lanes of the load warp call the methods.
template <typename Tr, typename Params>
struct BlockLoader {
  const Params& p;
  const CUtensorMap &q_map, &k_map, &v_map;
  masked_attention::Shared<Tr>& shared;

  __device__ uint32_t query_bytes() const { return Tr::kDBlocks * block_bytes(); }
  __device__ void load_queries(const WorkTile& x) const {
    load_query_rows(shared.q, q_map, shared.q_full, x);
  }
  __device__ void load_keys(const QueuedTile& x, int slot, int at) const {
    load_boxes(shared.k[at], k_map, shared.k_full[at], x, slot);
  }
  __device__ void load_values(const QueuedTile& x, int slot, int at) const {
    load_boxes(shared.v[at], v_map, shared.v_full[at], x, slot);
  }
  // Writes zeros to these rows of the values in stage `at` once they are loaded.
  __device__ void clear_rows(int at, uint32_t parity, const uint32_t* rows) const {
    mbarrier_wait(&shared.v_full[at], parity);
    masked_attention::clear_rows<Tr::kKeys, 32>(shared.v[at], rows, threadIdx.x % 32);
  }

  // Bytes of 64 columns of a tile's rows.
  __device__ uint32_t block_bytes() const { return p.tile_queries * (p.heads / p.groups) * 128; }
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
               shared.extra.rows[slot][box], x.work_tile.batch);
    }
    __syncwarp();
  }
};

// Mask warps: build the bits of each query of a step, and find the keys that no query sees. The two
// warps alternate between queue slots.
template <typename Tr, typename Params>
__device__ void build_query_bits(const Params& p, const TileLists& lists,
                                 masked_attention::Shared<Tr>& shared, int warp) {
  constexpr int kWords = Tr::kKeys / 32;
  const int lane = threadIdx.x % 32;
  const int rounds = ceil_div(p.tile_queries, 32);  // of queries, one per lane
  Steps<Tr::kKeys> steps(p.lists.block_size);
  const int word_boxes = max(1, 32 >> steps.box_shift), width = 32 / word_boxes;
  int batch = -1, head = 0, first_query = 0;  // the work tile that `steps` describes
  // Returns the row after the last one that query `i` of the tile sees.
  const auto end_of = [&](int i) {
    return i < p.tile_queries && first_query + i < p.queries
               ? key_end(p.lists, batch * p.queries + first_query + i, p.keys)
               : 0;
  };
  int first_end = 0;  // of this lane's first query
  for (RingPlace<Tr::kQueued> place = {warp, 0};; place = place + kMaskWarps) {
    const int at = place.index;
    mbarrier_wait(&shared.tile_queued[at], place.parity);
    const QueuedTile x = shared.queue[at];
    const WorkTile& work_tile = x.work_tile;
    if (work_tile.done) return;
    if (work_tile.nonempty) {
      if (work_tile.batch != batch || work_tile.head != head || work_tile.query != first_query) {
        batch = work_tile.batch, head = work_tile.head, first_query = work_tile.query;
        steps.start(lists, p.groups, work_tile);
        first_end = end_of(lane);
      }
      // Rolled loops, because the code of all warps together must fit in the instruction cache.
#pragma unroll 1
      for (int w = 0; w < kWords; ++w) {
        const int entry = steps.entry(x.key + 32 * w, 0) + lane;
        const bool exists = lane < word_boxes && entry < steps.entries;
        const int row = exists ? shared.extra.rows[at][(32 * w >> steps.box_shift) + lane] +
                                     (32 * w & ((1 << steps.box_shift) - 1))
                               : 0;
        uint32_t seen = 0;
#pragma unroll 1
        for (int r = 0; r < rounds; ++r) {
          // Lane i holds the queries that see box i of the word, and the row of its first key.
          const uint32_t sees =
              exists ? __ldg(steps.queries + int64_t{entry} * lists.words + r) : 0;
          const int end = r == 0 ? first_end : end_of(32 * r + lane);
          const uint32_t bits = word_bits(sees, row, end, word_boxes, width);
          shared.bits[at][32 * r + lane][w] = bits;
          seen |= bits;
        }
        seen = __reduce_or_sync(~0u, seen);
        if (lane == 0) shared.unseen[at][w] = ~seen;
      }
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.bits_built[at]);
      mbarrier_arrive(&shared.tile_released[at]);
    }
  }
}

// The producer warpgroup: warp 0 schedules tiles, warp 1 issues the loads, and warps 2 and 3 make
// the bits.
template <typename Tr, typename Params, typename Loader>
__device__ void produce_steps(const Params& p, const masked_attention::TileScheduler& scheduler,
                              const TileLists& lists, unsigned* tile_counter,
                              masked_attention::Shared<Tr>& shared, const Loader& loader) {
  const int warp = threadIdx.x / 32 % 4;
  if (warp == 0) {
    schedule_steps<Tr>(p, scheduler, lists, tile_counter, shared);
  } else if (warp == 1) {
    masked_attention::load_tiles<Tr>(shared, loader);
  } else {
    build_query_bits<Tr>(p, lists, shared, warp - 2);
  }
}

}  // namespace jax_dsa::sparse_attention
