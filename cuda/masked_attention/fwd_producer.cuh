// The warpgroup of the masked attention forward kernel that lists tiles, copies queries, keys and
// values, and makes the bits of partial tiles. See fwd.cuh.
#pragma once

#include "common/tma.cuh"
#include "masked_attention/fwd_plan.cuh"

namespace jax_dsa::masked_attention {

// The first warp: takes items and lists their tiles.
template <typename Tr>
__device__ void list(const MaskedAttentionFwdParams& p, const Work& work, const Bounds& bounds,
                     Shared<Tr>& shared) {
  const bool leader = threadIdx.x % 32 == 0;
  const int keys = static_cast<int>(p.keys);
  auto* const ticket = static_cast<unsigned*>(p.workspace);
  RingPlace<Tr::kListed> place = {0, 1};
  const auto put = [&](const Listing& x) {
    mbarrier_wait(&shared.unlisted[place.index], place.parity);
    if (leader) {
      shared.listing[place.index] = x;
      mbarrier_arrive(&shared.listed[place.index]);
    }
    place.advance();
  };
  for (;;) {
    unsigned number = 0;
    if (leader) number = atomicAdd(ticket, 1u);
    Item item = work.item(p, __shfl_sync(~0u, number, 0));
    if (item.over) {
      for (int i = 0; i < kBuilderWarps; ++i) put({item, 0, 0, false, true, true});
      return;
    }
    const QueryBounds* const q =
        bounds.queries
            ? bounds.queries + int64_t{item.batch} * work.query_tiles + item.query / kQueryTile
            : nullptr;
    const SegmentBounds* const segments =
        bounds.segments ? bounds.segments + int64_t{item.batch} * ceil_div(keys, kKeyTile)
                        : nullptr;
    const int number_of_map = static_cast<int>(map_number(p.mask, item.batch, item.head, p.heads));
    const int32_t* const map = map_tiles(p.mask, number_of_map);
    const int start = q ? max(q->min_start, 0) : 0, end = q ? min(q->max_end, keys) : keys;
    const bool any = start < end;
    TileWalk tiles(any ? start / Tr::kKeys : 0, any ? ceil_div(end, Tr::kKeys) : 0, [&](int tile) {
      return key_tile<Tr::kKeys>(p.mask, q, segments, map, keys, tile);
    });
    item.some = tiles.more();
    if (!item.some) put({item, 0, 0, false, true, true});
    for (bool first = true; tiles.more(); first = false) {
      Listing x = {item, number_of_map, tiles.tile() * Tr::kKeys, tiles.partial(), first, false};
      tiles.pass();
      x.last = !tiles.more();
      put(x);
    }
  }
}

// The second warp: copies. Keys that no query of a partial tile sees may hold anything, and 0 * NaN
// is NaN: their values become zeros.
template <typename Tr>
__device__ void copy(const MaskedAttentionFwdParams& p, const CUtensorMap& q_map,
                     const CUtensorMap& k_map, const CUtensorMap& v_map,
                     const CUtensorMap& bias_map, Shared<Tr>& shared) {
  const int lane = threadIdx.x % 32, per_group = p.heads / p.groups;
  const bool leader = lane == 0;
  RingPlace<Tr::kStages> ring = {0, 1};  // of what comes next, as `free` counts
  RingPlace<Tr::kBiasBuffers> bias = {0, 1};
  uint32_t q_parity = 1;
  int group = 0;
  for (RingPlace<Tr::kListed> place;; place.advance()) {
    mbarrier_wait(&shared.listed[place.index], place.parity);
    const Listing x = shared.listing[place.index];
    const Item& item = x.item;
    __syncwarp();
    if (x.first) {
      group = item.head / per_group;
      mbarrier_wait(&shared.q_free, q_parity);
      q_parity ^= 1;
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
          // The consumers do not look at its listing.
          mbarrier_arrive(&shared.unlisted[place.index], 1 + kConsumerWarps);
        }
      }
      if (item.over) return;
      if (!item.some) continue;
    }
    const int at = ring.index;
    mbarrier_wait(&shared.k_free[at], ring.parity);
    if (leader) {
      shared.stage[at] = {place.index, place.parity, x.partial, x.last};
      mbarrier_arrive_expect(&shared.k_full[at], Tr::kDBlocks * Tr::kKeyBlockBytes);
      for (int block = 0; block < Tr::kDBlocks; ++block) {
        tma_load(shared.k[at][block], &k_map, &shared.k_full[at], block * 64, group, x.key,
                 item.batch);
      }
    }
    if constexpr (Tr::kBias) {
      mbarrier_wait(&shared.bias.free[bias.index], bias.parity);
      if (leader) {
        load_bias(p.bias, bias_map, shared.bias, bias.index, item.batch, item.head, p.heads,
                  item.query, x.key);
      }
      bias.advance();
    }
    mbarrier_wait(&shared.v_free[at], ring.parity);
    if (leader) {
      mbarrier_arrive_expect(&shared.v_full[at], Tr::kEBlocks * Tr::kKeyBlockBytes);
      for (int block = 0; block < Tr::kEBlocks; ++block) {
        tma_load(shared.v[at][block], &v_map, &shared.v_full[at], block * 64, group, x.key,
                 item.batch);
      }
    }
    if (x.partial) {
      mbarrier_wait(&shared.built[place.index], place.parity);
      const uint32_t* const unseen = shared.unseen[place.index];
      uint32_t any = 0;
#pragma unroll
      for (int w = 0; w < Tr::kKeys / 32; ++w) any |= unseen[w];
      if (any != 0) {
        mbarrier_wait(&shared.v_full[at], ring.parity ^ 1);
        clear_rows<Tr::kKeys, 32>(shared.v[at], unseen, lane);
        fence_async_proxy();
      }
      __syncwarp();
    }
    if (leader) {
      mbarrier_arrive(&shared.v_clean[at]);
      mbarrier_arrive(&shared.unlisted[place.index]);
    }
    ring.advance();
  }
}

// The other two warps, in turn: make the bits of partial tiles.
template <typename Tr>
__device__ void build(const MaskedAttentionFwdParams& p, Shared<Tr>& shared, int warp) {
  constexpr int kWords = Tr::kKeys / 32, kRows = kQueryTile / 32;
  const int lane = threadIdx.x % 32, keys = static_cast<int>(p.keys);
  for (RingPlace<Tr::kListed> place = {warp, 0};; place = place + kBuilderWarps) {
    const int at = place.index;
    mbarrier_wait(&shared.listed[at], place.parity);
    const Listing x = shared.listing[at];
    const Item& item = x.item;
    if (item.over) return;
    if (x.partial) {
      uint32_t bits[kRows][kWords];
      query_bits<Tr::kKeys>(p.mask, x.map, item.batch, item.query, p.queries, x.key, keys, bits);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t seen = 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          shared.bits[at][r * 32 + lane][w] = bits[r][w];
          seen |= bits[r][w];
        }
        seen = __reduce_or_sync(~0u, seen);
        // Beyond the last key are zeros.
        if (lane == w) shared.unseen[at][w] = low_bits(keys - x.key - 32 * w) & ~seen;
      }
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.built[at]);
      mbarrier_arrive(&shared.unlisted[at]);
    }
  }
}

}  // namespace jax_dsa::masked_attention
