// The teacher of the indexer's warm-up loss: the probabilities of dense softmax attention, summed
// over the heads,
//
//     m_n = max_s scale * q_n . k_s        l_n = sum_s exp(scale * q_n . k_s - m_n)
//     out_s = sum_n exp(scale * q_n . k_s - m_n) / l_n
//
// over the keys that the query sees. This kernel is for the latent form, where many heads share a
// key. It computes what attn_dist (attn_dist/fwd.cuh) does, for consecutive keys, and first the
// maxima and sums, for which it computes the scores once more.
//
// Tiling. Heads are the rows of the MMA and keys its columns. A work tile is 128 rows: one query
// with up to 128 heads of a KV head group, or two, four or eight queries with up to 64, 32 or 16
// heads, padded to that number of rows (a warp has 16). More heads are further row passes. Row
// passes and groups follow one another and add to the output. The rows stay in registers while the
// key tiles that any of the queries sees are streamed twice. The first time, each thread
// accumulates the largest score and the sum of powers over its own columns, which four lanes
// combine at the end. The second time, the probabilities are summed over the rows.
//
// CTAs are persistent and iterate over work tiles (ranges.cuh).
//
// Warpgroups.
//   0, 1  MMA: 64 rows each, both with all key tiles. Ping-pong barriers alternate them on the
//         tensor cores: one computes exponentials while the other's MMA runs.
//   2     producer: copies heads and keys with cp.async of 16 bytes, and writes zeros in place of
//         keys outside the work tile's range, so that a NaN in a key that no query sees has no
//         effect
//
// Shared memory: a ring of three tiles of 64 rows, as in attn_dist, the sums of the warps (4 KiB)
// and mbarriers.
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
#include "losses/teacher_layout.cuh"

namespace jax_dsa::teacher {

inline constexpr int kThreads = 384;  // three warpgroups
inline constexpr int kStages = 3;

// The 64-column blocks of a tile that have their own mbarrier, so that the MMA can start with them.
template <int kD>
inline constexpr int kFirstBlocks = kD / 128 + 1;

// Named barriers. Barrier 0 is __syncthreads.
enum NamedBarrier {
  kPingPong = 1,  // ping-pong: warpgroup i may issue its MMAs after barrier kPingPong + i
  kSummed = 3,    // kSummed + i: the sums of warpgroup i's warps are in shared memory
  kCombined = 5,  // kCombined + i: those of both warpgroups are in buffer i
};

template <int kD>
struct alignas(1024) Shared {
  uint8_t tiles[kStages][kD / 64][kBlockBytes];
  float sums[2][8][kTile];  // [buffer][warp]: sums over the warp's 16 rows
  // For each MMA thread: the largest scores of its two rows, and whether a row of its warp exceeds
  // kExactBaseLimit.
  float2 largest[256];
  bool exact[256];
  uint64_t full[kStages][2];  // first kFirstBlocks blocks; whole tile
  uint64_t free[kStages];
};

// ---- copies ------------------------------------------------------------------------------------

template <int kD>
__device__ void produce(const TeacherParams& p, Shared<kD>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last(), drop = l2_policy_evict_first();
  const Layout layout(p);
  const int64_t stride = int64_t{p.groups} * kD * 2;
  Gather gather(warp, sub, chunk);
  RingPlace<kStages> ring;  // stage of the next tile
  const auto fill = [&](uint64_t policy) {
    uint64_t (&full)[2] = shared.full[ring.index];
    mbarrier_wait(&shared.free[ring.index], ring.parity ^ 1);
    const uint32_t to = smem_address(shared.tiles[ring.index]);
    gather.template copy<0, kFirstBlocks<kD>, 0>(to, policy);
    gather.template copy<0, kFirstBlocks<kD>, 1>(to, policy);
    cp_async_arrive(&full[0]);
    gather.template copy<kFirstBlocks<kD>, kD / 64, 0>(to, policy);
    gather.template copy<kFirstBlocks<kD>, kD / 64, 1>(to, policy);
    cp_async_arrive(&full[1]);
    ring.advance();
  };

  for (QueryWorkTiles work_tile; work_tile.next(p, layout.queries);) {
    const Tiles tiles = work_tile.tiles;
    const int64_t token = work_tile.batch * p.queries + work_tile.query;
    const char* const q = static_cast<const char*>(p.q) + token * p.heads * (kD * 2) + chunk * 16;
    const char* const kv =
        static_cast<const char*>(p.kv) + work_tile.batch * p.keys * stride + chunk * 16;
    for (int group = 0; group < p.groups; ++group) {
      for (int row_pass = 0; row_pass < layout.row_passes; ++row_pass) {
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = tile * kRows + Gather::row(warp, i, sub);
            const int query = layout.query(row), head = layout.head(row, row_pass);
            gather.valid[i] = head < layout.heads && work_tile.query + query < p.queries;
            const int64_t q_row = int64_t{query} * p.heads + group * layout.heads + head;
            gather.from[i] = q + (gather.valid[i] ? q_row * (kD * 2) : 0);
          }
          fill(drop);
        }
        for (int twice = 0; twice < 2; ++twice) {
          for (int tile = tiles.first; tile < tiles.last; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key = tile * kTile + Gather::row(warp, i, sub);
              gather.valid[i] = key >= tiles.low && key < tiles.high;
              gather.from[i] = kv + group * (kD * 2) + (gather.valid[i] ? key * stride : 0);
            }
            fill(keep);
          }
        }
      }
    }
  }
}

// ---- products ----------------------------------------------------------------------------------

// The main loop of MMA warpgroup `warpgroup`.
template <int kD>
__device__ void consume(const TeacherParams& p, Shared<kD>& shared, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int column = threadIdx.x % kTile, first_sum = threadIdx.x % 128 / kTile;
  const float scale_log2 = p.scale * kLog2E;
  const Layout layout(p);
  const bool both_warpgroups = layout.rows > kRows;
  const int warps = layout.rows / 16;  // warps whose sums add up to a query's
  const int sums = both_warpgroups ? 1 : kRows / layout.rows;  // queries per warpgroup
  const int own_query = layout.query(warpgroup * kRows + warp * 16);
  uint32_t q[kD / 16][4];
  float s[32];
  RingPlace<kStages> ring;  // stage of the next tile
  int buffer = 0;           // buffer of the next sums

  const auto release = [&](int arrivals) {  // arrivals of this warp
    __syncwarp();
    if (lane < arrivals) mbarrier_arrive(&shared.free[ring.index]);
    ring.advance();
  };
  const auto wait_for = [&](int barrier) {
    mbarrier_wait(&shared.full[ring.index][barrier], ring.parity);
  };
  const auto multiply = [&] {
    wait_for(0);
    named_barrier_sync<256>(kPingPong + warpgroup);
    // Tell the compiler that the index is uniform: descriptors must be in uniform registers.
    const int stage = __shfl_sync(~0u, ring.index, 0);
    attn_dist::multiply_heads<kD, kFirstBlocks<kD>>(
        s, q, smem_address(shared.tiles[stage]), [&] { wait_for(1); },
        [&] { named_barrier_arrive<256>(kPingPong + 1 - warpgroup); });
    wgmma_wait<0>();
    wgmma_pin(s);
    release(1);
  };

  // The warpgroups alternate from the first tile to the last, so neither is ever two MMAs ahead of
  // the other. This also makes it safe to skip the other warpgroup's head tile in the ring without
  // waiting for it, and to reuse a buffer of combined sums.
  if (warpgroup == 1) named_barrier_arrive<256>(kPingPong + 0);
  for (QueryWorkTiles work_tile; work_tile.next(p, layout.queries);) {
    const Tiles tiles = work_tile.tiles;
    const Range seen = range_of(p, work_tile.batch, work_tile.query + own_query);
    for (int row_pass = 0; row_pass < p.groups * layout.row_passes; ++row_pass) {
      if (warpgroup == 1) ring.advance();
      wait_for(0);
      attn_dist::load_heads<kD, kFirstBlocks<kD>>(q, smem_address(shared.tiles[ring.index]),
                                                  [&] { wait_for(1); });
      release(2);
      if (warpgroup == 0) ring.advance();

      Powers rows[2];
      for (int tile = tiles.first; tile < tiles.last; ++tile) {
        multiply();
        const int first = tile * kTile;
        const bool whole = seen.low <= first && first + kTile <= seen.high;
        add_scores(s, p.scale, first + lane % 4 * 2, whole, rows,
                   [&](int, int key) { return seen.has(key); });
      }
      float2 pair[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows[r].combine(1);
        rows[r].combine(2);
        const int row = warpgroup * kRows + warp * 16 + lane / 4 + 8 * r;
        const bool in_range = layout.head(row, row_pass % layout.row_passes) < layout.heads;
        pair[r] = in_range ? rows[r].pair() : make_float2(0.f, -INFINITY);
      }
      const float bases[2] = {pair[0].x * kLog2E, pair[1].x * kLog2E};
      const bool exact = __any_sync(~0u, fmaxf(fabsf(bases[0]), fabsf(bases[1])) > kExactBaseLimit);
      const float offset[2] = {pair[0].y - (exact ? 0.f : bases[0]),
                               pair[1].y - (exact ? 0.f : bases[1])};
      // Shared memory spares registers.
      shared.largest[threadIdx.x] = make_float2(pair[0].x, pair[1].x);
      shared.exact[threadIdx.x] = exact;

      for (int tile = tiles.first; tile < tiles.last; ++tile) {
        multiply();
        float factor_log2 = scale_log2;
        if (shared.exact[threadIdx.x]) {
          subtract_largest(s, p.scale, shared.largest[threadIdx.x]);
          factor_log2 = kLog2E;
        }
        reinterpret_cast<float2*>(shared.sums[buffer][warpgroup * 4 + warp])[lane] =
            attn_dist::sum_rows(s, factor_log2, offset);
        if (!both_warpgroups) {
          named_barrier_sync<128>(kSummed + warpgroup);
        } else if (warpgroup == 1) {
          named_barrier_sync<256>(kCombined + buffer);
        } else {
          named_barrier_arrive<256>(kCombined + buffer);
        }
        const int key = tile * kTile + column;
        for (int sum = first_sum; (warpgroup == 1 || !both_warpgroups) && sum < sums; sum += 2) {
          const int query = work_tile.query + (both_warpgroups ? 0 : warpgroup * sums + sum);
          const Range range = sums == 1 ? seen : range_of(p, work_tile.batch, query);
          if (!range.has(key)) continue;
          const float* from =
              &shared.sums[buffer][both_warpgroups ? 0 : warpgroup * 4 + sum * warps][column];
          const float total = attn_dist::sum_warps(from, warps);
          float* const to = p.out + (work_tile.batch * p.queries + query) * p.keys + key;
          *to = row_pass > 0 ? *to + total : total;
        }
        buffer ^= 1;
      }
    }
  }
  // Warpgroup 1 arrives once more than warpgroup 0 waits. Consume this arrival.
  if (warpgroup == 0) named_barrier_sync<256>(kPingPong + 0);
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    teacher_kernel(const __grid_constant__ TeacherParams p) {
  auto& shared = dynamic_shared<Shared<kD>>();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&shared.full[stage][0], 128);
      mbarrier_init(&shared.full[stage][1], 128);
      mbarrier_init(&shared.free[stage], 8);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  attn_dist::run_warpgroups<216, 72>([&](int warpgroup) { consume<kD>(p, shared, warpgroup); },
                                     [&] { produce<kD>(p, shared); });
}

}  // namespace jax_dsa::teacher
