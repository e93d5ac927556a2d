// The teacher of the indexer's warm-up: dense softmax attention's probabilities, summed over heads,
//
//     lse_n = log sum_s exp(scale * q_n . k_s)        out_s = sum_n exp(scale * q_n . k_s - lse_n)
//
// over the keys that the query sees: attn_dist (attn_dist/fwd.cuh) with keys in a row, and the
// log-sum-exp before it, which takes the same products once more.
//
// Heads are the rows of a product and keys its columns. A work item is what 128 rows take: a query
// of up to 128 heads of a group of keys, or two, four or eight queries of up to 64, 32 or 16, each
// padded to so many rows (a warp has 16). More heads and more groups come one after the other and
// add to the output. An item's rows stay in registers while the key tiles that any of its queries
// sees pass by twice: first each thread has the largest score and the sum of powers of its own
// columns, which four lanes join at the end; then the powers are summed over rows.
//
// Blocks are persistent and take items in turn (ranges.cuh).
//
// Warpgroups:
//   0, 1  64 rows each, both with all key tiles. They take turns on the tensor cores: one
//         exponentiates while the other's product runs.
//   2     copies heads and keys, 16 bytes a cp.async: what is no key of the item becomes zeros, so
//         that NaN in a key that no query sees goes nowhere
//
// Shared memory: a ring of three tiles of 64 rows, as in attn_dist; sums of the warps (4 KiB),
// mbarriers.
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

namespace jax_dsa::teacher {

inline constexpr int kThreads = 384;  // three warpgroups
inline constexpr int kRows = 64;      // of a head tile
inline constexpr int kStages = 3;

// Blocks of a tile that are waited for before the others.
template <int kD>
inline constexpr int kFirstPart = kD / 128 + 1;

// 0 is __syncthreads.
enum NamedBarrier {
  kTurn = 1,    // warpgroup kTurn + i may issue its products
  kSummed = 3,  // the warps' sums of warpgroup i are in shared memory
  kJoined = 5,  // ... of both warpgroups, in buffer i
};

template <int kD>
struct alignas(1024) Shared {
  uint8_t tiles[kStages][kD / 64][kBlockBytes];
  float sums[2][8][kTile];    // by buffer and warp: of the warp's 16 rows
  uint64_t full[kStages][2];  // the first part; all
  uint64_t free[kStages];
};

// How the heads of a group of keys make rows.
struct Layout {
  int heads;    // of a group
  int rows;     // of a query, with padding: 16, 32, 64 or 128
  int queries;  // of an item
  int passes;   // over the keys of a group, of 128 rows each

  __host__ __device__ explicit Layout(const TeacherParams& p)
      : heads(p.heads / p.groups),
        rows(heads <= 16   ? 16
             : heads <= 32 ? 32
             : heads <= 64 ? 64
                           : 128),
        queries(2 * kRows / rows),
        passes(ceil_div(heads, 2 * kRows)) {}

  // The query of the item, and the head of the group, that row r of the item's 128 has in a pass.
  __device__ int query(int r) const { return r / rows; }
  __device__ int head(int r, int pass) const { return pass * 2 * kRows + r % rows; }
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
  RingPlace<kStages> ring;  // of the tile that comes next
  const auto fill = [&](uint64_t policy) {
    uint64_t (&full)[2] = shared.full[ring.index];
    mbarrier_wait(&shared.free[ring.index], ring.parity ^ 1);
    const uint32_t to = smem_address(shared.tiles[ring.index]);
    gather.template copy<0, kFirstPart<kD>, 0>(to, policy);
    gather.template copy<0, kFirstPart<kD>, 1>(to, policy);
    cp_async_arrive(&full[0]);
    gather.template copy<kFirstPart<kD>, kD / 64, 0>(to, policy);
    gather.template copy<kFirstPart<kD>, kD / 64, 1>(to, policy);
    cp_async_arrive(&full[1]);
    ring.advance();
  };

  for (QueryItems items; items.next(p, layout.queries);) {
    const Tiles tiles = items.tiles;
    const int64_t token = items.batch * p.queries + items.query;
    const char* const q = static_cast<const char*>(p.q) + token * p.heads * (kD * 2) + chunk * 16;
    const char* const kv =
        static_cast<const char*>(p.kv) + items.batch * p.keys * stride + chunk * 16;
    for (int group = 0; group < p.groups; ++group) {
      for (int pass = 0; pass < layout.passes; ++pass) {
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = tile * kRows + Gather::row(warp, i, sub);
            const int query = layout.query(row), head = layout.head(row, pass);
            gather.valid[i] = head < layout.heads && items.query + query < p.queries;
            const int64_t of = int64_t{query} * p.heads + group * layout.heads + head;
            gather.from[i] = q + (gather.valid[i] ? of * (kD * 2) : 0);
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

// Warpgroup `side`.
template <int kD>
__device__ void consume(const TeacherParams& p, Shared<kD>& shared, int side) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int column = threadIdx.x % kTile, first_sum = threadIdx.x % 128 / kTile;
  const float scale_log2 = p.scale * kLog2E;
  const Layout layout(p);
  const bool joint = layout.rows > kRows;
  const int warps = layout.rows / 16;                // of a sum
  const int sums = joint ? 1 : kRows / layout.rows;  // of a warpgroup
  const int own_query = layout.query(side * kRows + warp * 16);
  uint32_t q[kD / 16][4];
  float s[32];
  RingPlace<kStages> ring;  // of the tile that comes next
  int buffer = 0;           // of the next sums

  const auto release = [&](int arrivals) {  // a warp's, of the tile
    __syncwarp();
    if (lane < arrivals) mbarrier_arrive(&shared.free[ring.index]);
    ring.advance();
  };
  const auto wait_for = [&](int part) {
    mbarrier_wait(&shared.full[ring.index][part], ring.parity);
  };
  const auto multiply = [&] {
    wait_for(0);
    named_barrier_sync<256>(kTurn + side);
    // The same in all lanes, which the compiler has to know: descriptors are in uniform registers.
    const int stage = __shfl_sync(~0u, ring.index, 0);
    attn_dist::multiply_heads<kD, kFirstPart<kD>>(
        s, q, smem_address(shared.tiles[stage]), [&] { wait_for(1); },
        [&] { named_barrier_arrive<256>(kTurn + 1 - side); });
    wgmma_wait<0>();
    wgmma_pin(s);
    release(1);
  };

  // Turns alternate from the first tile to the last, so that neither warpgroup is ever two products
  // ahead. This is also what makes it safe to pass over the other's head tile in the ring, without
  // waiting for it, and to reuse a buffer of joined sums.
  if (side == 1) named_barrier_arrive<256>(kTurn + 0);
  for (QueryItems items; items.next(p, layout.queries);) {
    const Tiles tiles = items.tiles;
    const Range seen = range_of(p, items.batch, items.query + own_query);
    for (int pass = 0; pass < p.groups * layout.passes; ++pass) {
      if (side == 1) ring.advance();
      wait_for(0);
      attn_dist::load_heads<kD, kFirstPart<kD>>(q, smem_address(shared.tiles[ring.index]),
                                                [&] { wait_for(1); });
      release(2);
      if (side == 0) ring.advance();

      Powers rows[2];
      for (int tile = tiles.first; tile < tiles.last; ++tile) {
        multiply();
        const int first = tile * kTile;
        const bool whole = seen.low <= first && first + kTile <= seen.high;
        add_scores(s, scale_log2, first + lane % 4 * 2, whole, rows,
                   [&](int, int key) { return seen.has(key); });
      }
      float offset[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows[r].join(1);
        rows[r].join(2);
        const int row = side * kRows + warp * 16 + lane / 4 + 8 * r;
        const bool there = layout.head(row, pass % layout.passes) < layout.heads;
        offset[r] = there ? rows[r].offset() : -INFINITY;
      }

      for (int tile = tiles.first; tile < tiles.last; ++tile) {
        multiply();
        reinterpret_cast<float2*>(shared.sums[buffer][side * 4 + warp])[lane] =
            attn_dist::sum_rows(s, scale_log2, offset);
        if (!joint) {
          named_barrier_sync<128>(kSummed + side);
        } else if (side == 1) {
          named_barrier_sync<256>(kJoined + buffer);
        } else {
          named_barrier_arrive<256>(kJoined + buffer);
        }
        const int key = tile * kTile + column;
        for (int sum = first_sum; (side == 1 || !joint) && sum < sums; sum += 2) {
          const int query = items.query + (joint ? 0 : side * sums + sum);
          const Range range = sums == 1 ? seen : range_of(p, items.batch, query);
          if (!range.has(key)) continue;
          const float* from = &shared.sums[buffer][joint ? 0 : side * 4 + sum * warps][column];
          const float total = attn_dist::sum_warps(from, warps);
          float* const to = p.out + (items.batch * p.queries + query) * p.keys + key;
          *to = pass > 0 ? *to + total : total;
        }
        buffer ^= 1;
      }
    }
  }
  // Takes the last turn, so that no barrier is left with arrivals.
  if (side == 0) named_barrier_sync<256>(kTurn + 0);
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
