// The warpgroup of the masked attention backward kernel that copies, and makes the bits of partial
// tiles. See bwd.cuh.
#pragma once

#include "common/tma.cuh"
#include "masked_attention/bwd_plan.cuh"

namespace jax_dsa::masked_attention {

// How many key tiles before tile `stop` the queries of a tile see any of; by a whole warp.
template <int kKeys>
__device__ __forceinline__ uint32_t tiles_before(const AttentionMask& m, const QueryBounds* q,
                                                 const SegmentBounds* segments, const int32_t* map,
                                                 int keys, int stop) {
  if (q == nullptr) return stop;
  uint32_t count = 0;
  for (int at = max(q->min_start, 0) / kKeys; at < stop; at += 32) {
    const int tile = at + static_cast<int>(threadIdx.x % 32);
    const bool some =
        tile < stop && key_tile<kKeys>(m, q, segments, map, keys, tile) != Tile::kEmpty;
    count += __popc(__ballot_sync(~0u, some));
  }
  return count;
}

// The first warp: takes items, lists the steps of each and copies them.
template <typename Tr>
__device__ void copy(const MaskedAttentionBwdParams& p, const BwdWork& work, const BwdWorkspace& w,
                     const Bounds& bounds, const CUtensorMap& q_map, const CUtensorMap& k_map,
                     const CUtensorMap& v_map, const CUtensorMap& dout_map,
                     const CUtensorMap& bias_map, BwdShared<Tr>& shared) {
  const bool leader = threadIdx.x % 32 == 0;
  const uint64_t keep = l2_policy_evict_last();
  const int keys = static_cast<int>(p.keys), per_group = p.heads / p.groups;
  const int query_tiles = static_cast<int>(ceil_div(p.queries, int64_t{kQueryTile}));
  RingPlace<Tr::kStages> ring = {0, 1};
  RingPlace<Tr::kBiasBuffers> bias = {0, 1};
  for (uint32_t parity = 1;; parity ^= 1) {
    unsigned number = 0;
    if (leader) number = atomicAdd(w.ticket, 1u);
    BwdItem item = work.item(p, __shfl_sync(~0u, number, 0));
    const QueryBounds* const q =
        bounds.queries ? bounds.queries + int64_t{item.batch} * query_tiles : nullptr;
    const SegmentBounds* const segments =
        bounds.segments ? bounds.segments + int64_t{item.batch} * ceil_div(keys, kKeyTile)
                        : nullptr;
    int first = 0, stop = item.over ? 0 : query_tiles;
    if (q && !item.over) {
      const KeyBounds x = w.keys[(int64_t{item.batch} * p.groups + item.group) * work.key_tiles +
                                 item.key / Tr::kKeys];
      first = x.first, stop = max(x.first, x.stop);
      for (int i = 0; i < 4; ++i) item.unseen[i] = x.unseen[i];
    }
    // Tiles of 128 queries of the group's heads.
    const int span = stop - first;
    // Where sums have an order, the last queries come first: under causal masks an item then comes
    // to the queries of the one before when that has gone on.
    const auto query_tile = [&](int n) { return p.deterministic ? stop - 1 - n : first + n; };
    TileWalk tiles(0, per_group * span, [&](int n) {
      const int head = n / span, tile = query_tile(n - head * span);
      return key_tile<Tr::kKeys>(
          p.mask, q ? q + tile : nullptr, segments,
          map_tiles(p.mask, map_number(p.mask, item.batch, item.group * per_group + head, p.heads)),
          keys, item.key / Tr::kKeys);
    });
    item.some = tiles.more();
    mbarrier_wait(&shared.kv_free, parity);
    if (leader) {
      shared.item = item;
      mbarrier_arrive(&shared.item_full);
      if (item.some) {
        mbarrier_arrive_expect(&shared.kv_full, (Tr::kDBlocks + Tr::kEBlocks) * Tr::kKeyBlockBytes);
        for (int block = 0; block < Tr::kDBlocks; ++block) {
          tma_load(shared.k[block], &k_map, &shared.kv_full, block * 64, item.group, item.key,
                   item.batch);
        }
        for (int block = 0; block < Tr::kEBlocks; ++block) {
          tma_load(shared.v[block], &v_map, &shared.kv_full, block * 64, item.group, item.key,
                   item.batch);
        }
      }
    }
    if (item.over) return;
    while (tiles.more()) {
      const int n = tiles.tile(), tile = query_tile(n % span);
      const int head = item.group * per_group + n / span;
      const bool partial = tiles.partial();
      uint32_t turn = 0;
      if (p.deterministic) {
        turn = tiles_before<Tr::kKeys>(
            p.mask, q ? q + tile : nullptr, segments,
            map_tiles(p.mask, map_number(p.mask, item.batch, head, p.heads)), keys,
            item.key / Tr::kKeys);
      }
      tiles.pass();
      const bool more = tiles.more();
      for (int query = tile * kQueryTile; query < min(int64_t{tile + 1} * kQueryTile, p.queries);
           query += kStepQueries) {
        const int at = ring.index;
        mbarrier_wait(&shared.free[at], ring.parity);
        if (leader) {
          const bool second = query % kQueryTile > 0 || query + kStepQueries >= p.queries;
          const int64_t step =
              (int64_t{item.batch} * p.heads + head) * work.steps + query / kStepQueries;
          shared.stage[at] = {head, query, partial, !more && second, turn, step};
          mbarrier_arrive(&shared.listed[at]);
          mbarrier_arrive_expect(&shared.q_full[at],
                                 Tr::kDBlocks * Tr::kQBlockBytes + 2 * kStepQueries * 4);
          for (int block = 0; block < Tr::kDBlocks; ++block) {
            tma_load(shared.q[at][block], &q_map, &shared.q_full[at], block * 64, head, query,
                     item.batch);
          }
          bulk_load(shared.lse[at], w.lse + step * kStepQueries, kStepQueries * 4,
                    &shared.q_full[at], keep);
          bulk_load(shared.delta[at], w.delta + step * kStepQueries, kStepQueries * 4,
                    &shared.q_full[at], keep);
          mbarrier_arrive_expect(&shared.dout_full[at], Tr::kEBlocks * Tr::kQBlockBytes);
          for (int block = 0; block < Tr::kEBlocks; ++block) {
            tma_load(shared.dout[at][block], &dout_map, &shared.dout_full[at], block * 64, head,
                     query, item.batch);
          }
        }
        if constexpr (Tr::kBias) {
          mbarrier_wait(&shared.bias.free[bias.index], bias.parity);
          if (leader) {
            load_bias(p.bias, bias_map, shared.bias, bias.index, item.batch, head, p.heads, query,
                      item.key);
          }
          bias.advance();
        }
        ring.advance();
      }
    }
  }
}

// The bits of a step's queries, by key: a warp takes 32 queries at a time.
template <typename Tr>
__device__ void build_bits(const MaskedAttentionBwdParams& p, const BwdItem& item,
                           const BwdStage& stage, uint32_t (&to)[Tr::kKeys][kStepQueries / 32],
                           int warp, int lane) {
  constexpr int kWords = Tr::kKeys / 32;
  for (int half = warp; half < kStepQueries / 32; half += kBuilders / 32) {
    uint32_t bits[1][kWords];
    query_bits<Tr::kKeys>(p.mask, map_number(p.mask, item.batch, stage.head, p.heads), item.batch,
                          stage.query + half * 32, p.queries, item.key, static_cast<int>(p.keys),
                          bits);
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

// The other three warps. Keys that no query sees, and queries that see no key, may hold anything,
// and 0 * NaN is NaN: they become zeros.
template <typename Tr>
__device__ void build(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                      BwdShared<Tr>& shared, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  RingPlace<Tr::kStages> ring;
  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  uint32_t kv_parity = 0;
  for (uint32_t parity = 0;; parity ^= 1) {
    mbarrier_wait(&shared.item_full, parity);
    const BwdItem item = shared.item;
    if (item.over) return;
    if (!item.some) {
      arrive(&shared.kv_free);
      continue;
    }
    if (item.unseen[0] | item.unseen[1] | item.unseen[2] | item.unseen[3]) {
      mbarrier_wait(&shared.kv_full, kv_parity);
      clear_rows<Tr::kKeys, kBuilders>(shared.k, shared.item.unseen, thread);
      fence_async_proxy();
    }
    kv_parity ^= 1;
    arrive(&shared.kv_clean);
    for (bool last = false; !last; ring.advance()) {
      const int at = ring.index;
      mbarrier_wait(&shared.listed[at], ring.parity);
      const BwdStage stage = shared.stage[at];
      last = stage.last;
      if (stage.partial) build_bits<Tr>(p, item, stage, shared.bits[at], warp, lane);
      const uint64_t* const dead = w.dead + stage.step;
      if (*dead != 0) {
        const auto* const rows = reinterpret_cast<const uint32_t*>(dead);
        mbarrier_wait(&shared.q_full[at], ring.parity);
        mbarrier_wait(&shared.dout_full[at], ring.parity);
        clear_rows<kStepQueries, kBuilders>(shared.q[at], rows, thread);
        clear_rows<kStepQueries, kBuilders>(shared.dout[at], rows, thread);
        fence_async_proxy();
      }
      arrive(&shared.checked[at]);
    }
    arrive(&shared.kv_free);
  }
}

}  // namespace jax_dsa::masked_attention
