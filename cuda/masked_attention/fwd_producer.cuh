// The producer warpgroup of the masked attention forward kernel. It schedules tiles, loads Q, K and
// V, and builds the mask bits of partial tiles. See fwd.cuh.
#pragma once

#include "common/tma.cuh"
#include "masked_attention/fwd_plan.cuh"

namespace jax_dsa::masked_attention {

// Scheduler warp: fetches work tiles and pushes their visible key tiles to the queue.
template <typename Tr>
__device__ void schedule_tiles(const MaskedAttentionFwdParams& p, const TileScheduler& scheduler,
                               const Bounds& bounds, Shared<Tr>& shared) {
  const bool leader = threadIdx.x % 32 == 0;
  const int keys = static_cast<int>(p.keys);
  auto* const tile_counter = static_cast<unsigned*>(p.workspace);
  RingPlace<Tr::kQueued> place = {0, 1};
  const auto push = [&](const QueuedTile& x) {
    mbarrier_wait(&shared.tile_released[place.index], place.parity);
    if (leader) {
      shared.queue[place.index] = x;
      mbarrier_arrive(&shared.tile_queued[place.index]);
    }
    place.advance();
  };
  for (;;) {
    unsigned index = 0;
    if (leader) index = atomicAdd(tile_counter, 1u);
    WorkTile work_tile = scheduler.work_tile(__shfl_sync(~0u, index, 0));
    if (work_tile.done) {
      for (int i = 0; i < kMaskWarps; ++i) push({work_tile, 0, 0, false, true, true});
      return;
    }
    const QueryBounds* const q =
        bounds.queries ? bounds.queries + int64_t{work_tile.batch} * scheduler.query_tiles +
                             work_tile.query / Tr::kRows
                       : nullptr;
    const SegmentBounds* const segments =
        bounds.segments ? bounds.segments + int64_t{work_tile.batch} * ceil_div(keys, kKeyTile)
                        : nullptr;
    const int map_index =
        static_cast<int>(mask_map_index(p.mask, work_tile.batch, work_tile.head, p.heads));
    const int32_t* const map = map_tiles(p.mask, map_index);
    const int start = q ? max(q->min_start, 0) : 0, end = q ? min(q->max_end, keys) : keys;
    const bool any = start < end;
    TileWalk tiles(any ? start / Tr::kKeys : 0, any ? ceil_div(end, Tr::kKeys) : 0, [&](int tile) {
      return classify_key_tile<Tr::kKeys>(p.mask, q, segments, map, keys, tile);
    });
    work_tile.nonempty = tiles.has_tile();
    if (!work_tile.nonempty) push({work_tile, 0, 0, false, true, true});
    for (bool first = true; tiles.has_tile(); first = false) {
      QueuedTile x = {work_tile,       map_index, tiles.tile() * Tr::kKeys,
                      tiles.partial(), first,     false};
      tiles.advance();
      x.last = !tiles.has_tile();
      push(x);
    }
  }
}

// Issues the TMA loads of the forward kernel. All lanes of the load warp call the methods.
template <typename Tr>
struct TileLoader {
  const MaskedAttentionFwdParams& p;
  const CUtensorMap &q_map, &k_map, &v_map, &bias_map;
  Shared<Tr>& shared;

  __device__ uint32_t query_bytes() const { return Tr::kDBlocks * Tr::kQBlockBytes; }
  __device__ void load_queries(const WorkTile& x) const {
    if (threadIdx.x % 32 != 0) return;
    for (int block = 0; block < Tr::kDBlocks; ++block) {
      tma_load(shared.q[block], &q_map, &shared.q_full, block * 64, x.head, x.query, x.batch);
    }
  }
  // Load the keys or the values of the tile in queue slot `slot` to stage `at`.
  __device__ void load_keys(const QueuedTile& x, int, int at) const {
    load(shared.k[at], k_map, shared.k_full[at], x);
  }
  __device__ void load_values(const QueuedTile& x, int, int at) const {
    load(shared.v[at], v_map, shared.v_full[at], x);
  }
  // Writes zeros to these rows of the values in stage `at` once they are loaded.
  __device__ void clear_rows(int at, uint32_t parity, const uint32_t* rows) const {
    mbarrier_wait(&shared.v_full[at], parity);
    masked_attention::clear_rows<Tr::kKeys, 32>(shared.v[at], rows, threadIdx.x % 32);
  }
  __device__ void load_biases(const QueuedTile& x, int at) const {
    if (threadIdx.x % 32 != 0) return;
    load_bias(p.bias, bias_map, shared.bias, at, x.work_tile.batch, x.work_tile.head, p.heads,
              x.work_tile.query, x.key);
  }

 private:
  template <int kBlocks>
  __device__ void load(uint8_t (&to)[kBlocks][Tr::kKeyBlockBytes], const CUtensorMap& map,
                       uint64_t& full, const QueuedTile& x) const {
    if (threadIdx.x % 32 != 0) return;
    const int group = x.work_tile.head / (p.heads / p.groups);
    for (int block = 0; block < kBlocks; ++block) {
      tma_load(to[block], &map, &full, block * 64, group, x.key, x.work_tile.batch);
    }
  }
};

// Load warp: issues the TMA loads. Keys that no query of a partial tile sees may hold anything, and
// 0 * NaN is NaN, so this warp writes zeros to their rows of the operand that the loader names.
template <typename Tr, typename Shared, typename Loader>
__device__ void load_tiles(Shared& shared, const Loader& loader) {
  const int lane = threadIdx.x % 32;
  const bool leader = lane == 0;
  RingPlace<Tr::kStages> ring = {0, 1};  // the next stage, with the parity of its free barriers
  RingPlace<Tr::kBiasBuffers> bias = {0, 1};
  uint32_t q_parity = 1;
  for (RingPlace<Tr::kQueued> place;; place.advance()) {
    mbarrier_wait(&shared.tile_queued[place.index], place.parity);
    const QueuedTile x = shared.queue[place.index];
    const WorkTile& work_tile = x.work_tile;
    __syncwarp();
    if (x.first) {
      mbarrier_wait(&shared.q_free, q_parity);
      q_parity ^= 1;
      if (leader) {
        shared.work_tile = work_tile;
        if (work_tile.nonempty) {
          mbarrier_arrive_expect(&shared.q_full, loader.query_bytes());
        } else {
          mbarrier_arrive(&shared.q_full);
          // The consumers skip this queue entry, so arrive on their behalf.
          mbarrier_arrive(&shared.tile_released[place.index], 1 + Tr::kConsumerWarps);
        }
      }
      if (work_tile.done) return;
      if (!work_tile.nonempty) continue;
      loader.load_queries(work_tile);
    }
    const int at = ring.index;
    mbarrier_wait(&shared.k_free[at], ring.parity);
    if (leader) {
      shared.stage[at] = {place.index, place.parity, x.partial, x.last};
      mbarrier_arrive_expect(&shared.k_full[at], Tr::kDBlocks * Tr::kKeyBlockBytes);
    }
    loader.load_keys(x, place.index, at);
    if constexpr (Tr::kBias) {
      mbarrier_wait(&shared.bias.free[bias.index], bias.parity);
      loader.load_biases(x, bias.index);
      bias.advance();
    }
    mbarrier_wait(&shared.v_free[at], ring.parity);
    if (leader) mbarrier_arrive_expect(&shared.v_full[at], Tr::kEBlocks * Tr::kKeyBlockBytes);
    loader.load_values(x, place.index, at);
    if (x.partial) {
      mbarrier_wait(&shared.bits_built[place.index], place.parity);
      const uint32_t* const unseen = shared.unseen[place.index];
      uint32_t any = 0;
#pragma unroll
      for (int w = 0; w < Tr::kKeys / 32; ++w) any |= unseen[w];
      if (any != 0) {
        loader.clear_rows(at, ring.parity ^ 1, unseen);
        fence_async_proxy();
      }
      __syncwarp();
    }
    if (leader) {
      mbarrier_arrive(&shared.cleared[at]);
      mbarrier_arrive(&shared.tile_released[place.index]);
    }
    ring.advance();
  }
}

// Mask warps: build the mask bits of partial tiles. The two warps alternate between queue slots.
template <typename Tr>
__device__ void build_mask_bits(const MaskedAttentionFwdParams& p, Shared<Tr>& shared, int warp) {
  // Each step has this many queries per lane, so that their bits fit in the registers.
  constexpr int kWords = Tr::kKeys / 32, kRows = Tr::kWarpgroups > 2 ? 2 : 4;
  const int lane = threadIdx.x % 32, keys = static_cast<int>(p.keys);
  for (RingPlace<Tr::kQueued> place = {warp, 0};; place = place + kMaskWarps) {
    const int at = place.index;
    mbarrier_wait(&shared.tile_queued[at], place.parity);
    const QueuedTile x = shared.queue[at];
    const WorkTile& work_tile = x.work_tile;
    if (work_tile.done) return;
    if (x.partial) {
      uint32_t seen[kWords] = {};
#pragma unroll 1
      for (int row = 0; row < Tr::kRows; row += kRows * 32) {
        uint32_t bits[kRows][kWords];
        query_bits<Tr::kKeys>(p.mask, x.map, work_tile.batch, work_tile.query + row, p.queries,
                              x.key, keys, bits);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            shared.bits[at][row + r * 32 + lane][w] = bits[r][w];
            seen[w] |= bits[r][w];
          }
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t any = __reduce_or_sync(~0u, seen[w]);
        // TMA fills rows beyond the last key with zeros already.
        if (lane == w) shared.unseen[at][w] = low_bits(keys - x.key - 32 * w) & ~any;
      }
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.bits_built[at]);
      mbarrier_arrive(&shared.tile_released[at]);
    }
  }
}

}  // namespace jax_dsa::masked_attention
