// The warpgroup of the masked attention forward kernel that copies queries, keys and values, and
// makes the bits of partial tiles. See fwd.cuh.
#pragma once

#include "common/tma.cuh"
#include "masked_attention/fwd_plan.cuh"

namespace jax_dsa::masked_attention {

// The first warp: takes items, lists their tiles and copies them.
template <typename Tr>
__device__ void copy(const MaskedAttentionFwdParams& p, const Work& work, const Bounds& bounds,
                     const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map,
                     const CUtensorMap& bias_map, Shared<Tr>& shared) {
  const bool leader = threadIdx.x % 32 == 0;
  auto* const ticket = static_cast<unsigned*>(p.workspace);
  RingPlace<Tr::kStages> ring = {0, 1};  // of what comes next, as `free` counts
  RingPlace<Tr::kBiasBuffers> bias = {0, 1};
  for (uint32_t q_parity = 1;; q_parity ^= 1) {
    unsigned number = 0;
    if (leader) number = atomicAdd(ticket, 1u);
    Item item = work.item(p, __shfl_sync(~0u, number, 0));
    if (item.over) {
      mbarrier_wait(&shared.k_free[ring.index], ring.parity);
      mbarrier_wait(&shared.q_free, q_parity);
      if (leader) {
        shared.stage[ring.index].key = -1;
        mbarrier_arrive(&shared.listed[ring.index]);
        shared.item = item;
        mbarrier_arrive(&shared.q_full);
      }
      return;
    }
    const int keys = static_cast<int>(p.keys);
    const QueryBounds* const q =
        bounds.queries
            ? bounds.queries + int64_t{item.batch} * work.query_tiles + item.query / kQueryTile
            : nullptr;
    const SegmentBounds* const segments =
        bounds.segments ? bounds.segments + int64_t{item.batch} * ceil_div(keys, kKeyTile)
                        : nullptr;
    const int32_t* const map = map_tiles(p.mask, item.batch, item.head, p.heads);
    const int start = q ? max(q->min_start, 0) : 0, end = q ? min(q->max_end, keys) : keys;
    const bool any = start < end;
    TileWalk tiles(any ? start / Tr::kKeys : 0, any ? ceil_div(end, Tr::kKeys) : 0, [&](int tile) {
      return key_tile<Tr::kKeys>(p.mask, q, segments, map, keys, tile);
    });
    item.some = tiles.more();

    mbarrier_wait(&shared.q_free, q_parity);
    if (leader) {
      shared.item = item;
      if (item.some) {
        mbarrier_arrive_expect(&shared.q_full, Tr::kDBlocks * Tr::kQBlockBytes);
        for (int block = 0; block < Tr::kDBlocks; ++block) {
          tma_load(shared.q[block], &q_map, &shared.q_full, block * 64, item.head, item.query,
                   item.batch);
        }
      } else {
        mbarrier_arrive(&shared.q_full);
      }
    }
    const int group = item.head / (p.heads / p.groups);
    while (tiles.more()) {
      const int key = tiles.tile() * Tr::kKeys;
      const bool partial = tiles.partial();
      tiles.pass();
      const bool last = !tiles.more();
      const int at = ring.index;
      mbarrier_wait(&shared.k_free[at], ring.parity);
      if (leader) {
        shared.stage[at] = {item.batch, item.head, item.query, key, partial, last};
        mbarrier_arrive(&shared.listed[at]);
        mbarrier_arrive_expect(&shared.k_full[at], Tr::kDBlocks * Tr::kKeyBlockBytes);
        for (int block = 0; block < Tr::kDBlocks; ++block) {
          tma_load(shared.k[at][block], &k_map, &shared.k_full[at], block * 64, group, key,
                   item.batch);
        }
      }
      if constexpr (Tr::kBias) {
        mbarrier_wait(&shared.bias.free[bias.index], bias.parity);
        if (leader) {
          load_bias(p.bias, bias_map, shared.bias, bias.index, item.batch, item.head, p.heads,
                    item.query, key);
        }
        bias.advance();
      }
      mbarrier_wait(&shared.v_free[at], ring.parity);
      if (leader) {
        mbarrier_arrive_expect(&shared.v_full[at], Tr::kEBlocks * Tr::kKeyBlockBytes);
        for (int block = 0; block < Tr::kEBlocks; ++block) {
          tma_load(shared.v[at][block], &v_map, &shared.v_full[at], block * 64, group, key,
                   item.batch);
        }
      }
      ring.advance();
    }
  }
}

// The other three warps: make the bits of partial tiles. Keys that no query of the tile sees may
// hold anything, and 0 * NaN is NaN: their values become zeros.
template <typename Tr>
__device__ void build(const MaskedAttentionFwdParams& p, Shared<Tr>& shared, int thread) {
  constexpr int kWords = Tr::kKeys / 32;
  const int lane = thread % 32, keys = static_cast<int>(p.keys);
  for (RingPlace<Tr::kStages> ring;; ring.advance()) {
    const int at = ring.index;
    mbarrier_wait(&shared.listed[at], ring.parity);
    const Stage stage = shared.stage[at];
    if (stage.key < 0) return;
    bool clean = true;
    if (stage.partial) {
      const int32_t* const map = map_tiles(p.mask, stage.batch, stage.head, p.heads);
      uint32_t seen[kWords] = {};
      for (int row = thread; row < kQueryTile; row += kBuilders) {
        uint32_t bits[kWords] = {};
        if (stage.query + row < p.queries) {
          query_bits<Tr::kKeys>(p.mask, map, stage.batch, stage.query + row, p.queries, stage.key,
                                keys, bits);
        }
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          shared.bits[at][row][w] = bits[w];
          seen[w] |= bits[w];
        }
      }
      show_seen(seen, shared.seen, thread);
      named_barrier_sync<kBuilders>(kBuilt);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t unseen = low_bits(keys - stage.key - 32 * w);  // beyond them are zeros
        for (int i = 0; i < kBuilders / 32; ++i) unseen &= ~shared.seen[i][w];
        if (thread == w) shared.unseen[w] = unseen;
        clean = clean && unseen == 0;
      }
      named_barrier_sync<kBuilders>(kBuilt);  // also before `seen` is written again
      if (lane == 0) mbarrier_arrive(&shared.k_full[at]);
      // The last values must be used: their phase would pass for this one's, here and at their
      // readers.
      mbarrier_wait(&shared.v_free[at], ring.parity ^ 1);
      if (!clean) {
        mbarrier_wait(&shared.v_full[at], ring.parity);
        clear_rows<Tr::kKeys, Tr::kEBlocks>(shared.v[at], shared.unseen, thread);
        fence_async_proxy();
        __syncwarp();
      }
    } else {
      if (lane == 0) mbarrier_arrive(&shared.k_full[at]);
      mbarrier_wait(&shared.v_free[at], ring.parity ^ 1);
    }
    if (lane == 0) mbarrier_arrive(&shared.v_clean[at]);
  }
}

}  // namespace jax_dsa::masked_attention
