// The producer warpgroup of the kernels that walk over the union of the lists of a tile of queries.
#pragma once

#include "common/tma.cuh"
#include "masked_attention/fwd_producer.cuh"
#include "sparse_attention/rows.cuh"
#include "sparse_attention/steps.cuh"

namespace jax_dsa::sparse_attention {

using masked_attention::kMaskWarps;
using masked_attention::QueuedTile;

// Blocks of at most this many keys are gathered with cp.async, and larger ones are loaded with TMA.
// A TMA box of 4 rows and 64 columns takes 60 to 80 clocks, so that the boxes of a step with blocks
// of 4 would take several times as long as its products.
inline constexpr int kMaxGatheredBlock = 16;

template <typename Params>
__device__ __forceinline__ bool gathers(const Params& p) {
  return p.lists.block_size <= kMaxGatheredBlock;
}

// Warps that gather: 1 for all rows, or 2, one of them for keys and the other for values. K and V
// of a stage become free at different times, so two warps need not wait for each other's stages.
inline constexpr int kGatherWarps = 2;
// The other warps beside the scheduler build the bits of gathered steps.
inline constexpr int kGatherMaskWarps = 3 - kGatherWarps;

// Whether the mask warps note which MMA warpgroups see a step, for a kernel that skips steps.
template <typename Tr>
inline constexpr bool kNotesSeen = requires(typename Tr::Extra extra) { extra.seen_by; };

// Initializes the mbarriers. One thread calls this.
template <typename Tr, typename Params>
__device__ void init_barriers(const Params& p, masked_attention::Shared<Tr>& shared) {
  if (gathers(p)) {
    masked_attention::init_barriers<Tr>(shared, 32 + 1, kGatherWarps + 1);
  } else {
    masked_attention::init_barriers<Tr>(shared);
  }
}

// Scheduler warp: fetches work tiles and pushes their steps to the queue. `QueuedTile::key` counts
// the keys of the union. The rows of a step are looked up before its queue slot is free.
template <typename Tr, typename Params>
__device__ void schedule_steps(const Params& p, const masked_attention::TileScheduler& scheduler,
                               const TileLists& lists, unsigned* tile_counter,
                               masked_attention::Shared<Tr>& shared) {
  constexpr int kWords = Tr::kKeys / 32;
  const int lane = threadIdx.x % 32;
  RingPlace<Tr::kQueued> place = {0, 1};
  Steps<Tr::kKeys> steps(p.lists.block_size);
  int rows[kWords] = {};  // of this lane's keys in the next step
  const auto find_rows = [&](int key) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      rows[w] = steps.row(key + 32 * w + lane, static_cast<int>(p.keys));
    }
  };
  const auto push = [&](const QueuedTile& x) {
    mbarrier_wait(&shared.tile_released[place.index], place.parity);
#pragma unroll
    for (int w = 0; w < kWords; ++w) shared.extra.rows[place.index][32 * w + lane] = rows[w];
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
    find_rows(0);
#pragma unroll 1
    for (int key = 0; key < keys; key += Tr::kKeys) {
      push({x, 0, key, true, key == 0, key + Tr::kKeys >= keys});
      find_rows(key + Tr::kKeys);
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
               shared.extra.rows[slot][box * box_keys], x.work_tile.batch);
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
  const WarpgroupQueries own_queries(p.heads / p.groups);
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
      uint32_t seen_by = 0;
      // Rolled loops, because the code of all warps together must fit in the instruction cache.
#pragma unroll 1
      for (int w = 0; w < kWords; ++w) {
        const int entry = steps.entry(x.key + 32 * w) + lane;
        const bool exists = lane < word_boxes && entry < steps.entries;
        const int row = exists ? shared.extra.rows[at][32 * w + lane * width] : 0;
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
          if constexpr (kNotesSeen<Tr>) {
            seen_by |= own_queries.warpgroups(__ballot_sync(~0u, bits != 0), 32 * r);
          }
        }
        seen = __reduce_or_sync(~0u, seen);
        if (lane == 0) shared.unseen[at][w] = ~seen;
      }
      if constexpr (kNotesSeen<Tr>) {
        if (lane == 0) shared.extra.seen_by[at] = seen_by;
      }
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.bits_built[at]);
      mbarrier_arrive(&shared.tile_released[at]);
    }
  }
}

// Copies the rows of a step from x [keys, groups, dim] to a stage, where `x` points to the first
// row. Eight lanes copy a row, each lane one 16-byte chunk of each block of 64 columns. Rows whose
// bit in `unseen` is set become zeros.
template <int kKeys, int kBlocks>
__device__ __forceinline__ void gather_rows(uint8_t (&to)[kBlocks][kKeys * 128], const void* x,
                                            uint32_t row_bytes, int dim, const int32_t* rows,
                                            const uint32_t* unseen, uint64_t policy) {
  const int lane = threadIdx.x % 32, chunk = lane % 8, sub = lane / 8;
  const char* const from = static_cast<const char*>(x) + chunk * 16;
  const uint32_t offset = sub * 128 + (chunk ^ sub) * 16;
  const int own_blocks = (dim - chunk * 8 + 63) / 64;  // blocks in which this lane's chunk exists
  rows += sub;
#pragma unroll 1
  for (int w = 0; w < kKeys / 32; ++w) {
    const uint32_t hidden = unseen[w] >> sub;
    uint32_t row[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) row[i] = static_cast<uint32_t>(rows[32 * w + 4 * i]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const char* const source = from + uint64_t{row[i]} * row_bytes;
      const int blocks = hidden >> 4 * i & 1 ? 0 : own_blocks;
      const uint32_t target = whole_sum(smem_address(to) + w * 4096, offset ^ i % 2 * 64) + i * 512;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        cp_async_16(target + block * (kKeys * 128), source + block * 128, block < blocks, policy);
      }
    }
  }
}

// Load warps of gathered blocks: copy the keys, the values, or both. The warp that copies keys also
// loads Q. Copies write zeros in place of rows that no query sees, which may hold anything.
template <typename Tr, typename Params, typename Loader>
__device__ void gather_steps(const Params& p, masked_attention::Shared<Tr>& shared,
                             const Loader& loader, bool keys, bool values) {
  const bool leader = threadIdx.x % 32 == 0;
  const uint64_t policy = l2_policy_evict_last();
  RingPlace<Tr::kStages> ring = {0, 1};  // the next stage, with the parity of its free barriers
  uint32_t q_parity = 1;
  for (RingPlace<Tr::kQueued> place;; place.advance()) {
    const int slot = place.index;
    mbarrier_wait(&shared.tile_queued[slot], place.parity);
    const QueuedTile x = shared.queue[slot];
    const WorkTile& work_tile = x.work_tile;
    __syncwarp();
    // The same as in masked_attention::load_tiles. A common function would change the registers of
    // masked attention's load warp.
    if (keys && x.first) {
      mbarrier_wait(&shared.q_free, q_parity);
      q_parity ^= 1;
      if (leader) {
        shared.work_tile = work_tile;
        if (work_tile.nonempty) {
          mbarrier_arrive_expect(&shared.q_full, loader.query_bytes());
        } else {
          mbarrier_arrive(&shared.q_full);
          mbarrier_arrive(&shared.tile_released[slot], Tr::kConsumerWarps);
        }
      }
      if (work_tile.nonempty) loader.load_queries(work_tile);
    }
    if (work_tile.done) return;
    if (!work_tile.nonempty) {
      if (leader) mbarrier_arrive(&shared.tile_released[slot]);
      continue;
    }
    mbarrier_wait(&shared.bits_built[slot], place.parity);
    const int at = ring.index;
    const int64_t first = work_tile.batch * p.keys * p.groups + work_tile.head;
    const auto copy = [&]<int kBlocks>(uint8_t (&to)[kBlocks][Tr::kKeyBlockBytes], const void* from,
                                       int dim, uint64_t* full, uint64_t* free) {
      mbarrier_wait(free, ring.parity);
      gather_rows<Tr::kKeys>(to, static_cast<const uint16_t*>(from) + first * dim,
                             static_cast<uint32_t>(p.groups) * dim * 2, dim,
                             shared.extra.rows[slot], shared.unseen[slot], policy);
      cp_async_arrive(full);
    };
    if (keys) {
      copy(shared.k[at], p.k, p.dim, &shared.k_full[at], &shared.k_free[at]);
      if (leader) {
        shared.stage[at] = {slot, place.parity, x.partial, x.last};
        mbarrier_arrive(&shared.k_full[at]);
      }
    }
    if (values) {
      copy(shared.v[at], p.v, p.value_dim, &shared.v_full[at], &shared.v_free[at]);
      if (leader) {
        mbarrier_arrive(&shared.v_full[at]);
        mbarrier_arrive(&shared.cleared[at]);
      }
    }
    __syncwarp();
    if (leader) mbarrier_arrive(&shared.tile_released[slot]);
    ring.advance();
  }
}

// Mask warp of gathered blocks: does what build_query_bits does, but a lane has a key and not a
// box, and the queries take turns. `warp` is its number among kGatherMaskWarps.
template <typename Tr, typename Params>
__device__ void build_key_bits(const Params& p, const TileLists& lists,
                               masked_attention::Shared<Tr>& shared, int warp) {
  constexpr int kWords = Tr::kKeys / 32;
  const int lane = threadIdx.x % 32;
  const int rounds = ceil_div(p.tile_queries, 32);
  const WarpgroupQueries own_queries(p.heads / p.groups);
  Steps<Tr::kKeys> steps(p.lists.block_size);
  WorkTile tile = {-1};  // the work tile that `steps` describes
  const auto end_of = [&](int i) {
    return i < p.tile_queries && tile.query + i < p.queries
               ? key_end(p.lists, tile.batch * p.queries + tile.query + i, p.keys)
               : 0;
  };
  // Returns which queries of round `r` see the block of this lane's key of a word.
  const auto find_queries = [&](int key, int r) {
    const int entry = steps.entry(key + lane);
    return static_cast<uint32_t>(
        load_now(reinterpret_cast<const int*>(steps.queries) + int64_t{entry} * lists.words + r,
                 entry < steps.entries, 0));
  };
  uint32_t next[kWords] = {};  // what find_queries returns for round 0 of the next step
  int first_end = 0;           // of this lane's first query
  for (RingPlace<Tr::kQueued> place = {warp, 0};; place = place + kGatherMaskWarps) {
    const int at = place.index;
    mbarrier_wait(&shared.tile_queued[at], place.parity);
    const QueuedTile x = shared.queue[at];
    if (x.work_tile.done) return;
    if (x.work_tile.nonempty) {
      if (x.work_tile.batch != tile.batch || x.work_tile.head != tile.head ||
          x.work_tile.query != tile.query) {
        tile = x.work_tile;
        steps.start(lists, p.groups, tile);
        first_end = end_of(lane);
#pragma unroll
        for (int w = 0; w < kWords; ++w) next[w] = find_queries(x.key + 32 * w, 0);
      }
      uint32_t seen_by = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int row = shared.extra.rows[at][32 * w + lane];
        uint32_t seen = 0;
#pragma unroll 1
        for (int r = 0; r < rounds; ++r) {
          const uint32_t sees = r == 0 ? next[w] : find_queries(x.key + 32 * w, r);
          const int end = r == 0 ? first_end : end_of(32 * r + lane);
          const int queries = min(p.tile_queries - 32 * r, 32);
          uint32_t bits = 0;
#pragma unroll 2
          for (int i = 0; i < queries; ++i) {
            const bool before_end = row < __shfl_sync(~0u, end, i);
            const uint32_t keys = __ballot_sync(~0u, before_end && (sees >> i & 1));
            if (lane == i) bits = keys;
          }
          shared.bits[at][32 * r + lane][w] = bits;
          seen |= bits;
          if constexpr (kNotesSeen<Tr>) {
            seen_by |= own_queries.warpgroups(__ballot_sync(~0u, bits != 0), 32 * r);
          }
        }
        seen = __reduce_or_sync(~0u, seen);
        if (lane == 0) shared.unseen[at][w] = ~seen;
        next[w] = find_queries(x.key + kGatherMaskWarps * Tr::kKeys + 32 * w, 0);
      }
      if constexpr (kNotesSeen<Tr>) {
        if (lane == 0) shared.extra.seen_by[at] = seen_by;
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
// the bits. With gathered blocks, warps 1 to kGatherWarps copy rows.
template <typename Tr, typename Params, typename Loader>
__device__ void produce_steps(const Params& p, const masked_attention::TileScheduler& scheduler,
                              const TileLists& lists, unsigned* tile_counter,
                              masked_attention::Shared<Tr>& shared, const Loader& loader) {
  const int warp = threadIdx.x / 32 % 4;
  if (warp == 0) {
    schedule_steps<Tr>(p, scheduler, lists, tile_counter, shared);
  } else if (gathers(p)) {
    if (warp <= kGatherWarps) {
      gather_steps<Tr>(p, shared, loader, warp == 1, warp == kGatherWarps);
    } else {
      build_key_bits<Tr>(p, lists, shared, warp - kGatherWarps - 1);
    }
  } else if (warp == 1) {
    masked_attention::load_tiles<Tr>(shared, loader);
  } else {
    build_query_bits<Tr>(p, lists, shared, warp - 2);
  }
}

}  // namespace jax_dsa::sparse_attention
