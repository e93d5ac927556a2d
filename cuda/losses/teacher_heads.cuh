// The teacher of the warm-up loss (see teacher.cuh) for attention in multi-head form, where each
// head or a few heads have their own keys. The rows of the MMA are 128 queries of one head.
//
// The first kernel computes the largest score of each query and head, and the sum. A work tile is
// 128 queries of one head. Its rows stay in registers while the key tiles that any of the queries
// sees are streamed.
//
// The second kernel sums the probabilities over the heads. A work tile is 128 queries and 64 keys.
// The sums stay in registers until they are complete, so for each head both tiles are loaded again.
// With 192 dims these are 72 KiB for 3.1 MFLOP, which the L2 delivers in about twice the MMAs'
// time.
//
// Warpgroups.
//   0, 1  MMA: 64 queries each
//   2     producer: copies with cp.async of 16 bytes
//
// Shared memory: a ring of tiles of 64 rows, which holds queries and keys in the order of their
// use.
#pragma once

#include <cstdint>

#include "attn_dist/heads.cuh"
#include "common/gather.cuh"
#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "losses/losses.h"
#include "losses/powers.cuh"
#include "losses/ranges.cuh"
#include "losses/teacher_heads_plan.cuh"

namespace jax_dsa::teacher_heads {

inline constexpr int kThreads = 384;

template <int kD>
struct alignas(1024) Shared {
  static constexpr int kStages = kD > 192 ? 6 : 8;
  uint8_t tiles[kStages][kD / 64][kBlockBytes];
  uint64_t full[kStages], free[kStages];
};

template <int kD, Pass kPass>
__device__ void produce(const TeacherParams& p, Shared<kD>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last();
  Gather gather(warp, sub, chunk);
  RingPlace<Shared<kD>::kStages> ring;
  // Copies the tile of rows first, first + 1, ..., which are `stride` bytes apart. Rows from
  // `limit` on become zeros.
  const auto fill = [&](const char* from, int64_t stride, int first, int64_t limit) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + Gather::row(warp, i, sub);
      gather.valid[i] = row < limit;
      gather.from[i] = from + (gather.valid[i] ? row * stride : 0);
    }
    mbarrier_wait(&shared.free[ring.index], ring.parity ^ 1);
    const uint32_t to = smem_address(shared.tiles[ring.index]);
    gather.template copy<0, kD / 64, 0>(to, keep);
    gather.template copy<0, kD / 64, 1>(to, keep);
    cp_async_arrive(&shared.full[ring.index]);
    ring.advance();
  };
  const int64_t q_stride = int64_t{p.heads} * kD * 2, kv_stride = int64_t{p.groups} * kD * 2;
  const int group_heads = p.heads / p.groups;
  for (WorkTiles<kPass, kTile> work_tile; work_tile.next(p);) {
    const char* const q =
        static_cast<const char*>(p.q) + work_tile.batch * p.queries * q_stride + chunk * 16;
    const char* const kv =
        static_cast<const char*>(p.kv) + work_tile.batch * p.keys * kv_stride + chunk * 16;
    const int heads = kPass == Pass::kSums ? p.heads : work_tile.head + 1;
    for (int head = work_tile.head; head < heads; ++head) {
      for (int tile = 0; tile < 2; ++tile) {
        fill(q + head * (kD * 2), q_stride, work_tile.query + tile * kTile, p.queries);
      }
      for (int tile = work_tile.tiles.first; tile < work_tile.tiles.last; ++tile) {
        fill(kv + head / group_heads * (kD * 2), kv_stride, tile * kTile, p.keys);
      }
    }
  }
}

// The main loop of MMA warpgroup `warpgroup`.
template <int kD, Pass kPass>
__device__ void consume(const TeacherParams& p, Shared<kD>& shared, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, column = lane % 4 * 2;
  const int own_row = warpgroup * kTile + warp * 16 + lane / 4;  // and own_row + 8
  const float scale_log2 = p.scale * kLog2E;
  uint32_t q[kD / 16][4];
  float s[32];
  RingPlace<Shared<kD>::kStages> ring;

  const auto wait = [&] { mbarrier_wait(&shared.full[ring.index], ring.parity); };
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.free[ring.index]);
    ring.advance();
  };
  const auto load_queries = [&] {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      wait();
      if (tile == warpgroup) {
        attn_dist::load_heads<kD, kD / 64>(q, smem_address(shared.tiles[ring.index]), [] {});
      }
      // Wait for and release the other warpgroup's tile, too. Without this, a later wait for the
      // stage could come a whole round late and misread the parity.
      release();
    }
  };
  const auto multiply = [&] {
    wait();
    const int stage = uniform(ring.index);
    attn_dist::multiply_heads<kD, kD / 64>(s, q, smem_address(shared.tiles[stage]), [] {}, [] {});
    wgmma_wait<0>();
    wgmma_pin(s);
    release();
  };

  for (WorkTiles<kPass, kTile> work_tile; work_tile.next(p);) {
    const int64_t token = work_tile.batch * p.queries + work_tile.query + own_row;
    const Range seen[2] = {range_of(p, work_tile.batch, work_tile.query + own_row),
                           range_of(p, work_tile.batch, work_tile.query + own_row + 8)};
    const bool in_range[2] = {work_tile.query + own_row < p.queries,
                              work_tile.query + own_row + 8 < p.queries};
    if constexpr (kPass == Pass::kLogSumExp) {
      load_queries();
      teacher::Powers rows[2];
      for (int tile = work_tile.tiles.first; tile < work_tile.tiles.last; ++tile) {
        multiply();
        const int first = tile * kTile;
        const auto covers = [&](Range x) { return x.low <= first && first + kTile <= x.high; };
        const bool whole = __all_sync(~0u, covers(seen[0]) && covers(seen[1]));
        teacher::add_scores(s, p.scale, first + column, whole, rows,
                            [&](int r, int key) { return seen[r].has(key); });
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows[r].combine(1);
        rows[r].combine(2);
        if (in_range[r] && lane % 4 == 0) {
          p.pairs[(token + 8 * r) * p.heads + work_tile.head] = rows[r].pair();
        }
      }
    } else {
      float sum[32] = {};
      for (int head = 0; head < p.heads; ++head) {
        float2 pair[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          pair[r] = make_float2(0.f, -INFINITY);
          if (in_range[r]) pair[r] = p.pairs[(token + 8 * r) * p.heads + head];
        }
        load_queries();
        multiply();
        float offset[2] = {fmaf(pair[0].x, -kLog2E, pair[0].y),
                           fmaf(pair[1].x, -kLog2E, pair[1].y)};
        float factor_log2 = scale_log2;
        if (__any_sync(~0u, fmaxf(fabsf(pair[0].x), fabsf(pair[1].x)) * kLog2E > kExactBaseLimit)) {
          teacher::subtract_largest(s, p.scale, make_float2(pair[0].x, pair[1].x));
          factor_log2 = kLog2E;
          offset[0] = pair[0].y, offset[1] = pair[1].y;
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          sum[i] += exp2_approx(fmaf(s[i], factor_log2, offset[i / 2 % 2]));
        }
      }
      const int key = work_tile.tiles.first * kTile + column;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int r = i / 2 % 2, own = key + i / 4 * 8 + i % 2;
        if (seen[r].has(own)) p.out[(token + 8 * r) * p.keys + own] = sum[i];
      }
    }
  }
}

template <int kD, Pass kPass>
__global__ void __launch_bounds__(kThreads, 1)
    teacher_heads_kernel(const __grid_constant__ TeacherParams p) {
  auto& shared = dynamic_shared<Shared<kD>>();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shared<kD>::kStages; ++stage) {
      mbarrier_init(&shared.full[stage], 128);
      mbarrier_init(&shared.free[stage], 8);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  attn_dist::run_warpgroups<208, 88>(
      [&](int warpgroup) { consume<kD, kPass>(p, shared, warpgroup); },
      [&] { produce<kD, kPass>(p, shared); });
}

}  // namespace jax_dsa::teacher_heads
