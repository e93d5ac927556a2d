// The producer warpgroup of the masked attention backward kernel. It schedules and loads steps, and
// builds the mask bits of partial tiles. See bwd.cuh.
#pragma once

#include "common/tma.cuh"
#include "masked_attention/bwd_plan.cuh"

namespace jax_dsa::masked_attention {

// Load warp: fetches work tiles, schedules the steps of each, and issues their TMA loads.
template <typename Tr>
__device__ void load_steps(const MaskedAttentionBwdParams& p, const BwdTileScheduler& scheduler,
                           const BwdWorkspace& w, const Bounds& bounds, const CUtensorMap& q_map,
                           const CUtensorMap& k_map, const CUtensorMap& v_map,
                           const CUtensorMap& dout_map, const CUtensorMap& bias_map,
                           BwdShared<Tr>& shared) {
  const bool leader = threadIdx.x % 32 == 0;
  const uint64_t evict_last = l2_policy_evict_last();
  const int keys = static_cast<int>(p.keys), heads_per_group = p.heads / p.groups;
  const int query_tiles = static_cast<int>(ceil_div(p.queries, int64_t{kQueryTile}));
  RingPlace<Tr::kStages> ring = {0, 1};
  RingPlace<Tr::kBiasBuffers> bias = {0, 1};
  for (uint32_t parity = 1;; parity ^= 1) {
    unsigned index = 0;
    if (leader) index = atomicAdd(w.tile_counter, 1u);
    BwdWorkTile work_tile = scheduler.work_tile(p, __shfl_sync(~0u, index, 0));
    const QueryBounds* const q =
        bounds.queries ? bounds.queries + int64_t{work_tile.batch} * query_tiles : nullptr;
    const SegmentBounds* const segments =
        bounds.segments ? bounds.segments + int64_t{work_tile.batch} * ceil_div(keys, kKeyTile)
                        : nullptr;
    int first = 0, stop = work_tile.done ? 0 : query_tiles;
    if (q && !work_tile.done) {
      const KeyBounds x =
          w.keys[(int64_t{work_tile.batch} * p.groups + work_tile.group) * scheduler.key_tiles +
                 work_tile.key / Tr::kKeys];
      first = x.first, stop = max(x.first, x.stop);
      for (int i = 0; i < 4; ++i) work_tile.unseen[i] = x.unseen[i];
    }
    // Number of 128-query tiles per head of the group.
    const int span = stop - first;
    // With ordered sums, iterate from the last queries to the first. Under a causal mask, a work
    // tile then reaches the queries of the previous work tile after that one has moved on.
    const auto query_tile = [&](int n) { return p.deterministic ? stop - 1 - n : first + n; };
    TileWalk tiles(0, heads_per_group * span, [&](int n) {
      const int head = n / span, tile = query_tile(n - head * span);
      return classify_key_tile<Tr::kKeys>(
          p.mask, q ? q + tile : nullptr, segments,
          map_tiles(p.mask, mask_map_index(p.mask, work_tile.batch,
                                           work_tile.group * heads_per_group + head, p.heads)),
          keys, work_tile.key / Tr::kKeys);
    });
    work_tile.nonempty = tiles.has_tile();
    mbarrier_wait(&shared.kv_free, parity);
    if (leader) {
      shared.work_tile = work_tile;
      mbarrier_arrive(&shared.work_tile_full);
      if (work_tile.nonempty) {
        mbarrier_arrive_expect(&shared.kv_full, (Tr::kDBlocks + Tr::kEBlocks) * Tr::kKeyBlockBytes);
        for (int block = 0; block < Tr::kDBlocks; ++block) {
          tma_load(shared.k[block], &k_map, &shared.kv_full, block * 64, work_tile.group,
                   work_tile.key, work_tile.batch);
        }
        for (int block = 0; block < Tr::kEBlocks; ++block) {
          tma_load(shared.v[block], &v_map, &shared.kv_full, block * 64, work_tile.group,
                   work_tile.key, work_tile.batch);
        }
      }
    }
    if (work_tile.done) return;
    while (tiles.has_tile()) {
      const int n = tiles.tile(), tile = query_tile(n % span);
      const int head = work_tile.group * heads_per_group + n / span;
      const bool partial = tiles.partial();
      uint32_t earlier_adds = 0;
      if (p.deterministic) {
        earlier_adds = visible_tiles_before<Tr::kKeys>(
            p.mask, q ? q + tile : nullptr, segments,
            map_tiles(p.mask, mask_map_index(p.mask, work_tile.batch, head, p.heads)), keys,
            work_tile.key / Tr::kKeys);
      }
      tiles.advance();
      const bool more_tiles = tiles.has_tile();
      for (int query = tile * kQueryTile; query < min(int64_t{tile + 1} * kQueryTile, p.queries);
           query += kStepQueries) {
        const int at = ring.index;
        mbarrier_wait(&shared.free[at], ring.parity);
        if (leader) {
          const bool second = query % kQueryTile > 0 || query + kStepQueries >= p.queries;
          const int64_t step =
              (int64_t{work_tile.batch} * p.heads + head) * scheduler.steps + query / kStepQueries;
          shared.stage[at] = {head, query, partial, !more_tiles && second, earlier_adds, step};
          mbarrier_arrive(&shared.stage_described[at]);
          mbarrier_arrive_expect(&shared.q_full[at],
                                 Tr::kDBlocks * Tr::kQBlockBytes + 2 * kStepQueries * 4);
          for (int block = 0; block < Tr::kDBlocks; ++block) {
            tma_load(shared.q[at][block], &q_map, &shared.q_full[at], block * 64, head, query,
                     work_tile.batch);
          }
          bulk_load(shared.lse[at], w.lse + step * kStepQueries, kStepQueries * 4,
                    &shared.q_full[at], evict_last);
          bulk_load(shared.delta[at], w.delta + step * kStepQueries, kStepQueries * 4,
                    &shared.q_full[at], evict_last);
          mbarrier_arrive_expect(&shared.dout_full[at], Tr::kEBlocks * Tr::kQBlockBytes);
          for (int block = 0; block < Tr::kEBlocks; ++block) {
            tma_load(shared.dout[at][block], &dout_map, &shared.dout_full[at], block * 64, head,
                     query, work_tile.batch);
          }
        }
        if constexpr (Tr::kBias) {
          mbarrier_wait(&shared.bias.free[bias.index], bias.parity);
          if (leader) {
            load_bias(p.bias, bias_map, shared.bias, bias.index, work_tile.batch, head, p.heads,
                      query, work_tile.key);
          }
          bias.advance();
        }
        ring.advance();
      }
    }
  }
}

// Builds the mask bits of a step, transposed: one row per key. Each warp takes 32 queries at a
// time.
template <typename Tr>
__device__ void build_mask_bits(const MaskedAttentionBwdParams& p, const BwdWorkTile& work_tile,
                                const BwdStage& stage, uint32_t (&to)[Tr::kKeys][kStepQueries / 32],
                                int warp, int lane) {
  constexpr int kWords = Tr::kKeys / 32;
  for (int half = warp; half < kStepQueries / 32; half += kMaskThreads / 32) {
    uint32_t bits[1][kWords];
    query_bits<Tr::kKeys>(p.mask, mask_map_index(p.mask, work_tile.batch, stage.head, p.heads),
                          work_tile.batch, stage.query + half * 32, p.queries, work_tile.key,
                          static_cast<int>(p.keys), bits);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t mine = 0;
      for (int i = 0; i < 32; ++i) {
        const uint32_t column = __ballot_sync(~0u, bits[0][w] >> i & 1);
        mine = lane == i ? column : mine;
      }
      to[w * 32 + lane][half] = mine;
    }
  }
}

// Mask warps. Keys that no query sees, and queries that see no key, may hold anything, and 0 * NaN
// is NaN, so these warps write zeros to their rows.
template <typename Tr>
__device__ void prepare_steps(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                              BwdShared<Tr>& shared, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  RingPlace<Tr::kStages> ring;
  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  uint32_t kv_parity = 0;
  for (uint32_t parity = 0;; parity ^= 1) {
    mbarrier_wait(&shared.work_tile_full, parity);
    const BwdWorkTile work_tile = shared.work_tile;
    if (work_tile.done) return;
    if (!work_tile.nonempty) {
      arrive(&shared.kv_free);
      continue;
    }
    if (work_tile.unseen[0] | work_tile.unseen[1] | work_tile.unseen[2] | work_tile.unseen[3]) {
      mbarrier_wait(&shared.kv_full, kv_parity);
      clear_rows<Tr::kKeys, kMaskThreads>(shared.k, shared.work_tile.unseen, thread);
      fence_async_proxy();
    }
    kv_parity ^= 1;
    arrive(&shared.kv_cleared);
    for (bool last = false; !last; ring.advance()) {
      const int at = ring.index;
      mbarrier_wait(&shared.stage_described[at], ring.parity);
      const BwdStage stage = shared.stage[at];
      last = stage.last;
      if (stage.partial) build_mask_bits<Tr>(p, work_tile, stage, shared.bits[at], warp, lane);
      if (thread == 0) {
        shared.flags[at] = (stage.partial ? kPartial : 0) | (w.huge[stage.step] ? kHugeRows : 0);
      }
      const uint64_t* const fully_masked = w.fully_masked + stage.step;
      if (*fully_masked != 0) {
        const auto* const rows = reinterpret_cast<const uint32_t*>(fully_masked);
        mbarrier_wait(&shared.q_full[at], ring.parity);
        mbarrier_wait(&shared.dout_full[at], ring.parity);
        clear_rows<kStepQueries, kMaskThreads>(shared.q[at], rows, thread);
        clear_rows<kStepQueries, kMaskThreads>(shared.dout[at], rows, thread);
        fence_async_proxy();
      }
      arrive(&shared.step_ready[at]);
    }
    arrive(&shared.kv_free);
  }
}

}  // namespace jax_dsa::masked_attention
