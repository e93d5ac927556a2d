// attn_dist, forward: for one query at a time, over the heads n of each head group,
//
//     out_i = sum_n gate_n * exp(scale * q_n . kv[idx_i] - lse_n)
//     gate_n = 1 / (1 + exp(sink_n - lse_n))
//
// Heads are the rows of a product and keys its columns: a head tile is 64 heads, a key tile 64 of
// the selected keys. The heads of a tile are those of one head group, or of two or four small ones,
// each padded to 32 or 16 rows (a warp has 16). A head group that is larger than a tile takes
// several, and its sums are joined.
//
// Blocks are persistent and take work items (query, group of keys, and a head group if it is larger
// than a tile) in turn; the items that are left for fewer than all blocks are cut by key tiles. An
// item's head tiles are passed over in pairs: both of a pair are held in
// registers, and every selected key is fetched once for the two.
//
// Warpgroups:
//   0, 1  a head tile each, both with all key tiles; of a single head tile the even and the odd key
//         tiles. They take turns on the tensor cores: one exponentiates and sums while the other's
//         product runs.
//   2     gathers head tiles and key tiles, 16 bytes a cp.async
//
// Sums: over a warp's 16 rows in its lanes (heads.cuh), then the warps' sums meet in shared memory.
// The gate's logarithm is added to lse. Nothing depends on the order in which warps run, so results
// repeat bit for bit.
//
// Shared memory: a ring of three tiles of 64 rows, in blocks of 64 columns of bf16 (8 KiB, 128-byte
// swizzle; see common/tile.cuh); for a pass over an item one or two head tiles go through it,
// which the warpgroups copy to their registers, then its key tiles. Sums of the warps (4 KiB),
// validity bits, mbarriers.
#pragma once

#include "attn_dist/fwd_plan.cuh"
#include "attn_dist/heads.cuh"
#include "common/limits.h"
#include "common/ptx.cuh"

namespace jax_dsa::attn_dist {

// ---- gather ------------------------------------------------------------------------------------

template <int kD>
__device__ void produce(const AttnDistFwdParams& p, Shared<kD>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const Layout layout(p);
  const int slot = Gather::row(warp, lane % 16 / 4, lane % 4);  // whose index this lane reads
  Gather gather(warp, sub, chunk);
  RingPlace<kStages> ring;  // of the tile that comes next
  // Fills the next tile, once it is free; `note` is what one lane a warp writes beside it.
  const auto fill = [&](uint64_t policy, bool copies, auto note) {
    uint64_t (&full)[2] = shared.full[ring.index];
    mbarrier_wait(&shared.free[ring.index], ring.parity ^ 1);
    if (lane == 0) {
      note(ring.index);
      mbarrier_arrive(&full[0]);
    }
    if (copies) {
      const uint32_t to = smem_address(shared.tiles[ring.index]);
      gather.template copy<0, kFirstPart, 0>(to, policy);
      gather.template copy<0, kFirstPart, 1>(to, policy);
      cp_async_arrive(&full[0]);
      gather.template copy<kFirstPart, kD / 64, 0>(to, policy);
      gather.template copy<kFirstPart, kD / 64, 1>(to, policy);
      cp_async_arrive(&full[1]);
    } else {
      mbarrier_arrive(&full[0]);
      mbarrier_arrive(&full[1]);
    }
    ring.advance();
  };

  for (Pieces pieces(p); pieces.next();) {
    const Item item(p, layout, pieces.number);
    Slots slots(p, item.token, item.group);
    slots.length = min(slots.length, pieces.last * kTile);
    const int tiles = max(count_tiles(slots, lane) - pieces.first, 0);
    const char* const q = static_cast<const char*>(p.q) + item.token * p.heads * (kD * 2);
    const int64_t stride = int64_t{p.groups} * kD * 2;
    const char* const kv = static_cast<const char*>(p.kv) + item.batch * p.keys * stride +
                           item.group * (kD * 2) + chunk * 16;
    for (int head_tile = 0; head_tile < layout.tiles; ++head_tile) {
      const HeadTile heads(p, layout, item, head_tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = heads.head(p, layout, Gather::row(warp, i, sub));
        gather.valid[i] = head >= 0;
        gather.from[i] = q + int64_t{max(head, 0)} * (kD * 2) + chunk * 16;
      }
      fill(drop, tiles > 0, [&](int stage) {
        if (warp == 0) shared.key_tiles[stage] = tiles;
      });
      // Keys follow the second tile of a pair, and the last.
      if (head_tile % 2 == 0 && head_tile + 1 < layout.tiles) continue;
      const int own = pieces.first * kTile + slot;
      int index = slots.index(own);
      for (int tile = 0; tile < tiles; ++tile) {
        const uint32_t bits = gather.set_rows(kv, stride, sub, index, slots.is_valid(index));
        if (tile + 1 < tiles) index = slots.index(own + (tile + 1) * kTile);
        fill(keep, true, [&](int stage) { shared.valid[stage].set(warp, bits); });
      }
    }
  }
}

// ---- products and sums -------------------------------------------------------------------------

// What to add to the scores of a head in log2 units, so that their powers are gated probabilities;
// -inf if they are to be 0 whatever the scores are.
__device__ __forceinline__ float score_offset(const AttnDistFwdParams& p, const Item& item,
                                              int head) {
  if (head < 0) return -INFINITY;
  const float lse = __ldg(p.lse + item.token * p.heads + head) * kLog2E;
  if (lse == -INFINITY) return lse;
  if (p.sinks == nullptr) return -lse;
  const float sink = __ldg(p.sinks + int64_t{item.batch} * p.sinks_stride + head) * kLog2E;
  const float x = sink - lse;
  // Under an infinite sink finite, for then a score that is NaN has to show.
  return -(lse + (x > 30.f ? fminf(x, 0x1p127f) : log2f(1.f + exp2_approx(x))));
}

// Warpgroup `side`.
template <int kD>
__device__ void consume(const AttnDistFwdParams& p, Shared<kD>& shared, int side) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + lane / 4;
  const int column = threadIdx.x % kTile, first_sum = threadIdx.x % 128 / kTile;
  const float scale_log2 = p.scale * kLog2E;
  const Layout layout(p);
  const int warps = layout.joint ? 8 : layout.rows / 16;  // of a sum
  uint32_t q[kD / 16][4];
  float s[32];
  RingPlace<kStages> ring;  // of the tile that comes next
  int buffer = 0;           // of the next sums

  const auto release = [&](int arrivals) {  // a warp's, of the tile
    __syncwarp();
    if (lane < arrivals) mbarrier_arrive(&shared.free[ring.index]);
  };
  const auto wait_for = [&](int part) {
    mbarrier_wait(&shared.full[ring.index][part], ring.parity);
  };
  const auto multiply = [&] {
    // The same in all lanes, which the compiler has to know: descriptors are in uniform registers.
    const int stage = __shfl_sync(~0u, ring.index, 0);
    multiply_heads<kD, kFirstPart>(
        s, q, smem_address(shared.tiles[stage]), [&] { wait_for(1); },
        [&] { named_barrier_arrive<256>(kTurn + 1 - side); });
  };

  // Turns alternate from the first tile to the last, so that neither warpgroup is ever two products
  // ahead. This is also what makes it safe to reuse a buffer of joined sums, and to pass over tiles
  // in the ring that the other one uses, without waiting for them: of two phases of a barrier
  // `wait_for` can tell only the next one from the last, so a tile that was passed over must have
  // come before the ring leads there again, and a turn comes in between.
  if (side == 1) named_barrier_arrive<256>(kTurn + 0);
  const auto pass_turn = [&] {  // without a tile
    named_barrier_sync<256>(kTurn + side);
    named_barrier_arrive<256>(kTurn + 1 - side);
  };
  for (Pieces pieces(p); pieces.next();) {
    const Item item(p, layout, pieces.number);
    const int slots = min(p.slots, pieces.last * kTile) - pieces.first * kTile;
    for (int head_tile = 0; head_tile < layout.tiles; head_tile += 2) {
      const bool pair = head_tile + 1 < layout.tiles;
      const HeadTile heads(p, layout, item, head_tile + (pair ? side : 0));
      const float offset[2] = {score_offset(p, item, heads.head(p, layout, row)),
                               score_offset(p, item, heads.head(p, layout, row + 8))};
      const bool writes = !layout.joint || side == 1;
      float* const out =
          p.out +
          ((item.batch * int64_t{p.heads / p.head_group} + heads.sum) * p.queries + item.query) *
              p.slots +
          pieces.first * kTile;
      const int64_t stride = p.queries * p.slots;  // between sums

      if (pair && side == 1) ring.advance();
      wait_for(0);
      const int tiles = shared.key_tiles[ring.index];
      load_heads<kD, kFirstPart>(q, smem_address(shared.tiles[ring.index]), [&] { wait_for(1); });
      release(pair ? 2 : 1);
      ring.advance();
      if (pair && side == 0) ring.advance();
      // There are too few turns without key tiles, or where a pair follows a single head tile.
      if (tiles == 0 || (layout.tiles > 1 && layout.tiles % 2 == 1)) pass_turn();

      // Slots after the last that counts.
      if (!layout.joint || (side == 1 && head_tile == 0)) {
        for (int sum = 0; sum < heads.sums; ++sum) {
          const int start = tiles * kTile + threadIdx.x % 128 + (pair ? 0 : side * 128);
          for (int i = start; i < slots; i += pair ? 128 : 256) out[sum * stride + i] = 0.f;
        }
      }
      const int step = pair ? 1 : 2, first_tile = pair ? 0 : side;
      if (first_tile > 0 && tiles > 0) ring.advance();
      for (int tile = first_tile; tile < tiles; tile += step) {
        wait_for(0);
        const bool counts = shared.valid[ring.index][column];
        named_barrier_sync<256>(kTurn + side);
        multiply();
        wgmma_wait<0>();
        wgmma_pin(s);
        release(step);
        ring.advance();
        if (!pair && tile + 1 < tiles) ring.advance();

        reinterpret_cast<float2*>(shared.sums[buffer][side * 4 + warp])[lane] =
            sum_rows(s, scale_log2, offset);
        if (!layout.joint) {
          named_barrier_sync<128>(kSummed + side);
        } else if (side == 1) {
          named_barrier_sync<256>(kJoined + buffer);
        } else {
          named_barrier_arrive<256>(kJoined + buffer);
        }
        const int at = tile * kTile + column;
        for (int sum = first_sum; writes && sum < heads.sums && at < slots; sum += 2) {
          const int first = layout.joint ? 0 : side * 4 + sum * warps;
          const float total = sum_warps(&shared.sums[buffer][first][column], warps);
          float* const to = out + sum * stride + at;
          *to = counts ? head_tile > 0 && layout.joint ? *to + total : total : 0.f;
        }
        buffer ^= 1;
      }
      if (!pair && side == 1 && tiles % 2 == 1) pass_turn();
    }
  }
  // Takes the last turn, so that no barrier is left with arrivals.
  if (side == 0) named_barrier_sync<256>(kTurn + 0);
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    fwd_kernel(const __grid_constant__ AttnDistFwdParams p) {
  constexpr int kConsumer = 216, kProducer = 72;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<Shared<kD>>();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&shared.full[stage][0], 128 + 4);
      mbarrier_init(&shared.full[stage][1], 128);
      mbarrier_init(&shared.free[stage], 8);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup < 2) {
    raise_registers<kConsumer>();
    consume<kD>(p, shared, warpgroup);
  } else {
    lower_registers<kProducer>();
    produce<kD>(p, shared);
  }
}

}  // namespace jax_dsa::attn_dist
