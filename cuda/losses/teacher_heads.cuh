// The teacher of the warm-up loss (see teacher.cuh) where every head, or few of them, has keys of
// its own: attention in multi-head form. Queries are the rows of a product, 128 of one head.
//
// The first kernel takes the log-sum-exp of each query and head: an item is 128 queries and a head,
// whose rows stay in registers while the key tiles that any of the queries sees pass by. The second
// one adds up the probabilities of a tile of 128 queries and 64 keys in registers, head by head, so
// that no sum goes to memory before it is complete: for each head both tiles come anew, 72 KiB at
// 192 dims for 3.1 MFLOP, which the L2 delivers in about twice the products' time.
//
// Warpgroups: 0 and 1 multiply, 64 queries each; 2 copies, 16 bytes a cp.async. Shared memory: a
// ring of tiles of 64 rows, which queries and keys go through in the order in which they are used.
#pragma once

#include <climits>
#include <cstdint>

#include "attn_dist/heads.cuh"
#include "common/gather.cuh"
#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "losses/losses.h"
#include "losses/powers.cuh"
#include "losses/ranges.cuh"

namespace jax_dsa::teacher_heads {

inline constexpr int kThreads = 384;
inline constexpr int kQueries = 128;  // of an item

template <int kD>
struct alignas(1024) Shared {
  static constexpr int kStages = kD > 192 ? 6 : 8;
  uint8_t tiles[kStages][kD / 64][kBlockBytes];
  uint64_t full[kStages], free[kStages];
};

enum class Pass { kLogSumExp, kSums };

__host__ __device__ inline int64_t item_count(const TeacherParams& p, Pass pass) {
  const int64_t others = pass == Pass::kLogSumExp ? p.heads : ceil_div(p.keys, int64_t{kTile});
  return p.batch * ceil_div(p.queries, int64_t{kQueries}) * others;
}

// A block's items with the tiles of keys that any of the queries sees: in the pass of sums those
// are one.
template <Pass kPass>
struct Items {
  int batch, query, head;  // the first query; in the first pass the head
  Tiles tiles;

  __device__ bool next(const TeacherParams& p) {
    const int items = static_cast<int>(item_count(p, kPass));
    const int per_batch = static_cast<int>(ceil_div(p.queries, int64_t{kQueries}));
    const int others = items / per_batch / static_cast<int>(p.batch);
    for (; number < items; number += gridDim.x) {
      const int other = number % others, group = number / others;
      batch = group / per_batch;
      query = (per_batch - 1 - group % per_batch) * kQueries;  // the last first
      int first = INT_MAX, last = 0;
      for (int i = 0; i < kQueries / 32; ++i) {
        const Tiles some = tiles_seen(p, batch, query + i * 32, 32);
        if (some.first == some.last) continue;
        first = min(first, some.first);
        last = max(last, some.last);
      }
      if (kPass == Pass::kSums) first = max(first, other), last = min(last, other + 1);
      if (first >= last) continue;
      head = kPass == Pass::kSums ? 0 : other;
      tiles = {first, last, 0, 0};
      number += gridDim.x;
      return true;
    }
    return false;
  }

 private:
  int number = blockIdx.x;
};

template <int kD, Pass kPass>
__device__ void produce(const TeacherParams& p, Shared<kD>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunk = lane % 8, sub = lane / 8;
  const uint64_t keep = l2_policy_evict_last();
  Gather gather(warp, sub, chunk);
  RingPlace<Shared<kD>::kStages> ring;
  // Rows first, first + 1, ... of `limit`, `stride` bytes apart.
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
  const int of_group = p.heads / p.groups;
  for (Items<kPass> item; item.next(p);) {
    const char* const q =
        static_cast<const char*>(p.q) + item.batch * p.queries * q_stride + chunk * 16;
    const char* const kv =
        static_cast<const char*>(p.kv) + item.batch * p.keys * kv_stride + chunk * 16;
    const int heads = kPass == Pass::kSums ? p.heads : item.head + 1;
    for (int head = item.head; head < heads; ++head) {
      for (int tile = 0; tile < 2; ++tile) {
        fill(q + head * (kD * 2), q_stride, item.query + tile * kTile, p.queries);
      }
      for (int tile = item.tiles.first; tile < item.tiles.last; ++tile) {
        fill(kv + head / of_group * (kD * 2), kv_stride, tile * kTile, p.keys);
      }
    }
  }
}

// Warpgroup `side`.
template <int kD, Pass kPass>
__device__ void consume(const TeacherParams& p, Shared<kD>& shared, int side) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, column = lane % 4 * 2;
  const int own_row = side * kTile + warp * 16 + lane / 4;  // and own_row + 8
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
      if (tile == side) {
        attn_dist::load_heads<kD, kD / 64>(q, smem_address(shared.tiles[ring.index]), [] {});
      }
      release();  // the other's tile, too: a wait for it could come a round late
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

  for (Items<kPass> item; item.next(p);) {
    const int64_t token = item.batch * p.queries + item.query + own_row;
    const Range seen[2] = {range_of(p, item.batch, item.query + own_row),
                           range_of(p, item.batch, item.query + own_row + 8)};
    const bool there[2] = {item.query + own_row < p.queries, item.query + own_row + 8 < p.queries};
    if constexpr (kPass == Pass::kLogSumExp) {
      load_queries();
      teacher::Powers rows[2];
      for (int tile = item.tiles.first; tile < item.tiles.last; ++tile) {
        multiply();
        const int first = tile * kTile;
        const auto covers = [&](Range x) { return x.low <= first && first + kTile <= x.high; };
        const bool whole = __all_sync(~0u, covers(seen[0]) && covers(seen[1]));
        teacher::add_scores(s, scale_log2, first + column, whole, rows,
                            [&](int r, int key) { return seen[r].has(key); });
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows[r].join(1);
        rows[r].join(2);
        if (there[r] && lane % 4 == 0) {
          p.offsets[(token + 8 * r) * p.heads + item.head] = rows[r].offset();
        }
      }
    } else {
      float sum[32] = {};
      for (int head = 0; head < p.heads; ++head) {
        float offset[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          offset[r] = load_now(p.offsets + (token + 8 * r) * p.heads + head, there[r], -INFINITY);
        }
        load_queries();
        multiply();
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          sum[i] += exp2_approx(fmaf(s[i], scale_log2, offset[i / 2 % 2]));
        }
      }
      const int key = item.tiles.first * kTile + column;
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
