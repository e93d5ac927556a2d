// Attention distribution (attn_dist), forward pass. For each query, slot i and head group, over the
// heads n of the group:
//
//   out_i  = sum_n gate_n * exp(scale * q_n . kv[idx_i] - lse_n)
//   gate_n = 1 / (1 + exp(sink_n - lse_n))
//
// Tiling. Heads are the rows of an MMA and keys its columns. A head tile is 64 heads, a key tile 64
// of the selected keys. A head tile holds one head group, or two or four small ones, each padded to
// 32 or 16 rows (a warp has 16). A head group with more heads takes several head tiles, whose sums
// are joined. A work tile is (query, KV head group), and also one head group if that takes several
// head tiles. CTAs are persistent and process whole work tiles; the work tiles that remain for
// fewer than all CTAs are split by key tiles. The head tiles of a work tile are processed in pairs:
// both are held in registers, and every selected key is fetched once for the two.
//
// Warpgroups.
//   0, 1  MMA: one head tile each, with all key tiles. A single head tile is held by both, which
//         process the even and the odd key tiles. Ping-pong barriers order their MMAs, so that one
//         computes exponentials and sums while the other's MMAs run.
//   2     producer: gathers head tiles and key tiles with cp.async
//
// Sums. Each warp sums its 16 rows by exchanges between lanes (heads.cuh), and the warps' sums are
// added through shared memory. The logarithm of the gate is part of the offset with lse. Nothing
// depends on the order in which warps run, so results are bit-identical on every run.
//
// Shared memory: three stages with a tile of 64 rows each, in blocks of 64 columns of bf16 (8 KiB,
// 128-byte swizzle; see common/tile.cuh). For each pair, one or two head tiles go through the
// stages, which the warpgroups copy to registers, then the key tiles. The rest holds the warps'
// sums (4 KiB), validity bits and mbarriers.
#pragma once

#include "attn_dist/fwd_plan.cuh"
#include "attn_dist/heads.cuh"
#include "attn_dist/offsets.cuh"
#include "common/ptx.cuh"
#include "common/softmax.cuh"

namespace jax_dsa::attn_dist {

// ---- Producer ----------------------------------------------------------------------------------

template <int kD>
__device__ void produce(const AttnDistFwdParams& p, Shared<kD>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const Layout layout(p);
  const int slot = Gather::row(warp, lane % 16 / 4, lane % 4);  // this lane reads its index
  Gather gather(warp, sub, chunk);
  RingPlace<kStages> ring;  // of the next tile
  // Fills the next stage once it is free. `note` writes what one lane per warp stores with the
  // tile.
  const auto fill = [&](uint64_t policy, bool copies, auto note) {
    uint64_t (&full)[2] = shared.full[ring.index];
    mbarrier_wait(&shared.free[ring.index], ring.parity ^ 1);
    if (lane == 0) {
      note(ring.index);
      mbarrier_arrive(&full[0]);
    }
    if (copies) {
      const uint32_t to = smem_address(shared.tiles[ring.index]);
      gather.template copy<0, kFirstBlocks, 0>(to, policy);
      gather.template copy<0, kFirstBlocks, 1>(to, policy);
      cp_async_arrive(&full[0]);
      gather.template copy<kFirstBlocks, kD / 64, 0>(to, policy);
      gather.template copy<kFirstBlocks, kD / 64, 1>(to, policy);
      cp_async_arrive(&full[1]);
    } else {
      mbarrier_arrive(&full[0]);
      mbarrier_arrive(&full[1]);
    }
    ring.advance();
  };

  for (KvSplits splits(p); splits.next();) {
    const WorkTile work_tile(p, layout, splits.work_index);
    Slots slots(p, work_tile.token, work_tile.group);
    slots.length = min(slots.length, splits.last * kTile);
    const int tiles = max(count_tiles(slots, lane) - splits.first, 0);
    const char* const q = static_cast<const char*>(p.q) + work_tile.token * p.heads * (kD * 2);
    const int64_t stride = int64_t{p.groups} * kD * 2;
    const char* const kv = static_cast<const char*>(p.kv) + work_tile.batch * p.keys * stride +
                           work_tile.group * (kD * 2) + chunk * 16;
    for (int head_tile = 0; head_tile < layout.head_tiles; ++head_tile) {
      const HeadTile heads(p, layout, work_tile, head_tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = heads.head(p, layout, Gather::row(warp, i, sub));
        gather.valid[i] = head >= 0;
        gather.from[i] = q + int64_t{max(head, 0)} * (kD * 2) + chunk * 16;
      }
      fill(drop, tiles > 0, [&](int stage) {
        if (warp == 0) shared.key_tiles[stage] = tiles;
      });
      // The key tiles follow the second head tile of a pair, and the last head tile.
      if (head_tile % 2 == 0 && head_tile + 1 < layout.head_tiles) continue;
      const int own = splits.first * kTile + slot;
      int index = slots.index(own);
      for (int tile = 0; tile < tiles; ++tile) {
        const uint32_t bits = gather.set_rows(kv, stride, sub, index, slots.is_valid(index));
        if (tile + 1 < tiles) index = slots.index(own + (tile + 1) * kTile);
        fill(keep, true, [&](int stage) { shared.valid[stage].set(warp, bits); });
      }
    }
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

// Runs in consumer warpgroup `side`.
template <int kD>
__device__ void consume(const AttnDistFwdParams& p, Shared<kD>& shared, int side) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + lane / 4;
  const int column = threadIdx.x % kTile, first_sum = threadIdx.x % 128 / kTile;
  const float scale_log2 = p.scale * kLog2E;
  const Layout layout(p);
  const int warps = layout.joint ? 8 : layout.rows_per_sum / 16;  // warps per sum
  uint32_t q[kD / 16][4];
  float s[32];
  RingPlace<kStages> ring;  // of the next tile
  int buffer = 0;           // for the next sums

  const auto release = [&](int arrivals) {  // by this warp, for the current tile
    __syncwarp();
    if (lane < arrivals) mbarrier_arrive(&shared.free[ring.index]);
  };
  const auto wait_for = [&](int barrier) {
    mbarrier_wait(&shared.full[ring.index][barrier], ring.parity);
  };
  const auto multiply = [&] {
    // All lanes have the same stage. The shuffle tells the compiler so, because descriptors must be
    // in uniform registers.
    const int stage = __shfl_sync(~0u, ring.index, 0);
    multiply_heads<kD, kFirstBlocks>(
        s, q, smem_address(shared.tiles[stage]), [&] { wait_for(1); },
        [&] { named_barrier_arrive<256>(kPingPong + 1 - side); });
  };

  // The warpgroups alternate at the ping-pong barriers from the first tile to the last, so that
  // neither is ever two products ahead. This also makes it safe to reuse a buffer of joined sums,
  // and to skip tiles of the other warpgroup in the ring without waiting for them. A wait can tell
  // the next phase of a barrier only from the last one, so a skipped tile must have arrived before
  // the ring returns to its stage. A ping-pong barrier in between ensures this.
  if (side == 1) named_barrier_arrive<256>(kPingPong + 0);
  const auto pass_ping_pong = [&] {  // without a tile
    named_barrier_sync<256>(kPingPong + side);
    named_barrier_arrive<256>(kPingPong + 1 - side);
  };
  for (KvSplits splits(p); splits.next();) {
    const WorkTile work_tile(p, layout, splits.work_index);
    const int slots = min(p.slots, splits.last * kTile) - splits.first * kTile;
    for (int head_tile = 0; head_tile < layout.head_tiles; head_tile += 2) {
      const bool pair = head_tile + 1 < layout.head_tiles;
      const HeadTile heads(p, layout, work_tile, head_tile + (pair ? side : 0));
      const float2 base = {score_base(p, work_tile, heads.head(p, layout, row)),
                           score_base(p, work_tile, heads.head(p, layout, row + 8))};
      const bool exact =
          __any_sync(~0u, fmaxf(fabsf(base.x), fabsf(base.y)) * kLog2E > kExactBaseLimit);
      // Shared memory spares registers.
      shared.base[threadIdx.x] = base;
      shared.exact[threadIdx.x] = exact;
      const float offset[2] = {score_offset(p, work_tile, heads.head(p, layout, row), exact),
                               score_offset(p, work_tile, heads.head(p, layout, row + 8), exact)};
      const bool writes = !layout.joint || side == 1;
      float* const out =
          p.out +
          ((work_tile.batch * int64_t{p.heads / p.head_group} + heads.sum) * p.queries +
           work_tile.query) *
              p.slots +
          splits.first * kTile;
      const int64_t stride = p.queries * p.slots;  // between sums

      if (pair && side == 1) ring.advance();
      wait_for(0);
      const int tiles = shared.key_tiles[ring.index];
      load_heads<kD, kFirstBlocks>(q, smem_address(shared.tiles[ring.index]), [&] { wait_for(1); });
      release(pair ? 2 : 1);
      ring.advance();
      if (pair && side == 0) ring.advance();
      // Without key tiles, or where a pair follows a single head tile, there would be too few
      // ping-pong barriers.
      if (tiles == 0 || (layout.head_tiles > 1 && layout.head_tiles % 2 == 1)) pass_ping_pong();

      // Write zeros to the slots after the last valid one.
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
        const bool valid = shared.valid[ring.index][column];
        named_barrier_sync<256>(kPingPong + side);
        multiply();
        wgmma_wait<0>();
        wgmma_pin(s);
        release(step);
        ring.advance();
        if (!pair && tile + 1 < tiles) ring.advance();

        float factor_log2 = scale_log2;
        if (shared.exact[threadIdx.x]) {
          const float2 base = shared.base[threadIdx.x];
#pragma unroll
          for (int i = 0; i < 32; ++i) {
            s[i] = __fmul_rn(s[i], p.scale) - (i / 2 % 2 ? base.y : base.x);
          }
          factor_log2 = kLog2E;
        }
        reinterpret_cast<float2*>(shared.sums[buffer][side * 4 + warp])[lane] =
            sum_rows(s, factor_log2, offset);
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
          *to = valid ? head_tile > 0 && layout.joint ? *to + total : total : 0.f;
        }
        buffer ^= 1;
      }
      if (!pair && side == 1 && tiles % 2 == 1) pass_ping_pong();
    }
  }
  // Wait at the last ping-pong barrier, so that no barrier is left with arrivals.
  if (side == 0) named_barrier_sync<256>(kPingPong + 0);
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    fwd_kernel(const __grid_constant__ AttnDistFwdParams p) {
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
  run_warpgroups<216, 72>([&](int warpgroup) { consume<kD>(p, shared, warpgroup); },
                          [&] { produce<kD>(p, shared); });
}

}  // namespace jax_dsa::attn_dist
