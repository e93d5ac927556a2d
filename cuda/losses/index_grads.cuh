// Backward pass of the indexer's logits at all keys that a query sees. With g = dL/dI and
//
//     x[t,j,s] = q[t,j] . k[s]        a[t,j,s] = [x > 0]        (a = 1 without relu)
//
//     dq[t,j] = w[t,j] sum_s a g[t,s] ks[s] k[s]        dw[t,j] = sum_s g[t,s] ks[s] a x
//     f[s] = sum_tj a g[t,s] w[t,j] q[t,j]              dk[s] = ks[s] f[s]    dks[s] = k[s] . f[s]
//
// dq and f have the same form. 64 rows stay in registers: the heads of a query for dq, keys for f.
// The kernel streams tiles of 64 columns: keys for dq, the heads of a query for f. Each tile adds
//
//     out[row] += sum_column h[row, column] tile[column]
//     h = bf16(g[t,s] ks[s]) a        for dq, times w at the end
//     h = bf16(g[t,s] w[t,j]) a       for f
//
// One kernel template therefore computes both.
//
// Operand layout. The rows are the left operand of x, in registers. The accumulator fragments of x
// become h and then feed the second MMA from registers. Each tile is read twice from shared memory,
// once K-major and once MN-major. The kernel for f computes all scores again. This costs a quarter
// of the products and saves storing 8 bytes of relu masks per (query, key).
//
// Tiling. A work tile of dq is two neighbouring queries with the key tiles that either of them
// sees. A work tile of f is 128 keys with the queries of a segment that see any of them. The f of
// each segment goes to the workspace, and a last kernel adds up the segments in order. The results
// do not depend on the order in which CTAs run.
//
// Warpgroups.
//   0, 1  MMA: one query or 64 keys each, with the same tiles
//   2     producer: copies with cp.async, and writes zeros in place of keys that no query of the
//         work tile sees
// An MMA warpgroup copies a tile's scores to other registers and starts the scores of the next tile
// before it computes h.
//
// Shared memory: a ring of 6 tiles (16 KiB each for 128 channels, in blocks of 64 columns, 128-byte
// swizzle) with the factors of h for each tile, and the rows.
#pragma once

#include <cstdint>

#include "common/gather.cuh"
#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "losses/index_grads_plan.cuh"
#include "losses/losses.h"
#include "losses/ranges.cuh"

namespace jax_dsa::index_grads {

inline constexpr int kStages = 6;
inline constexpr int kThreads = 384;

// kC is the number of channels, padded to 64 or 128.
template <int kC>
struct alignas(1024) Shared {
  uint8_t tiles[kStages][kC / 64][kBlockBytes];
  uint8_t rows[2][kC / 64][kBlockBytes];  // the rows of each warpgroup
  // Factors of h. For kKeys both warpgroups use the column factors [stage][0].
  float column_factors[kStages][2][kTile];
  float row_factors[kStages][2][kRows];  // used only for kKeys
  uint64_t rows_full[2], rows_free[2];
  uint64_t full[kStages], free[kStages];
};

// ---- copies ------------------------------------------------------------------------------------

// Prefetches the elements of `grad` that the work tile reads to the L2, because the producer loads
// factors only one tile ahead.
__device__ __forceinline__ void prefetch_grads(const IndexGradsParams& p,
                                               const WorkTiles<Gradient::kQueries>& work_tile,
                                               int i) {
  const Range seen = range_of(p, work_tile.batch, work_tile.query + i);
  if (i >= 2 || seen.low >= seen.high) return;
  const int low = seen.low / 4 * 4, high = ceil_div(seen.high, 4) * 4;
  prefetch_l2(p.grad + (work_tile.batch * p.queries + work_tile.query + i) * p.keys + low,
              (high - low) * 4);
}

__device__ __forceinline__ void prefetch_grads(const IndexGradsParams& p,
                                               const WorkTiles<Gradient::kKeys>& work_tile, int i) {
  const int query = work_tile.tiles.first + i;
  if (query >= work_tile.tiles.last) return;
  const int64_t keys = min(p.keys - work_tile.key, int64_t{kIndexGradsKeys});
  prefetch_l2(p.grad + (work_tile.batch * p.queries + query) * p.keys + work_tile.key,
              static_cast<uint32_t>(keys) * 4);
}

template <int kC, Gradient kGradient>
__device__ void copy(const IndexGradsParams& p, Shared<kC>& shared) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
  const int chunk = lane % 8, sub = lane / 8;
  const bool in_range = kC == 128 || chunk * 8 < p.channels;
  const uint64_t keep = l2_policy_evict_last();
  const int row_bytes = p.channels * 2;
  const char* const q = static_cast<const char*>(p.q) + chunk * 16;
  const char* const k = static_cast<const char*>(p.k) + chunk * 16;
  Gather gather(warp, sub, chunk);
  RingPlace<kStages> ring;
  uint32_t rows_parity = 1;

  const auto copy_rows = [&](uint8_t (&to)[kC / 64][kBlockBytes], uint64_t* full) {
    gather.template copy<0, kC / 64, 0>(smem_address(to), keep);
    gather.template copy<0, kC / 64, 1>(smem_address(to), keep);
    cp_async_arrive(full);
  };
  const auto address_heads = [&](int64_t token, bool query_exists) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = Gather::row(warp, i, sub);
      gather.valid[i] = query_exists && in_range && head < p.heads;
      gather.from[i] = q + (gather.valid[i] ? (token * p.heads + head) * row_bytes : 0);
    }
  };
  const auto address_keys = [&](int batch, int first, auto counts) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + Gather::row(warp, i, sub);
      gather.valid[i] = in_range && counts(key);
      gather.from[i] = k + (gather.valid[i] ? (batch * p.keys + key) * row_bytes : 0);
    }
  };

  for (WorkTiles<kGradient> work_tile; work_tile.next(p);) {
    const Tiles tiles = work_tile.tiles;
    Range seen[2];
    if constexpr (kGradient == Gradient::kQueries) {
      seen[0] = range_of(p, work_tile.batch, work_tile.query);
      seen[1] = range_of(p, work_tile.batch, work_tile.query + 1);
    }
    if (p.keys % 4 == 0) prefetch_grads(p, work_tile, thread);
    Factors next = factors(p, work_tile, tiles.first, thread);
#pragma unroll
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
      if constexpr (kGradient == Gradient::kQueries) {
        address_heads(work_tile.batch * p.queries + work_tile.query + warpgroup,
                      work_tile.query + warpgroup < p.queries);
      } else {
        address_keys(work_tile.batch, work_tile.key + warpgroup * kRows,
                     [&](int key) { return key < p.keys; });
      }
      mbarrier_wait(&shared.rows_free[warpgroup], rows_parity);
      copy_rows(shared.rows[warpgroup], &shared.rows_full[warpgroup]);
    }
    rows_parity ^= 1;
    for (int tile = tiles.first; tile < tiles.last; ++tile) {
      const Factors own = next;
      if (tile + 1 < tiles.last) next = factors(p, work_tile, tile + 1, thread);
      if constexpr (kGradient == Gradient::kQueries) {
        address_keys(work_tile.batch, tile * kTile,
                     [&](int key) { return seen[0].has(key) || seen[1].has(key); });
      } else {
        address_heads(work_tile.batch * p.queries + tile, true);
      }
      mbarrier_wait(&shared.free[ring.index], ring.parity ^ 1);
      (&shared.column_factors[ring.index][0][0])[thread] = own.column_factor;
      if (kGradient == Gradient::kKeys) {
        (&shared.row_factors[ring.index][0][0])[thread] = own.row_factor;
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.full[ring.index]);
      copy_rows(shared.tiles[ring.index], &shared.full[ring.index]);
      ring.advance();
    }
  }
}

// ---- products ----------------------------------------------------------------------------------

// The main loop of MMA warpgroup `warpgroup`.
template <int kC, Gradient kGradient>
__device__ void multiply(const IndexGradsParams& p, Shared<kC>& shared, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, column = lane % 4 * 2;
  const int own_row = warp * 16 + lane / 4;  // and own_row + 8
  const Relu relu(p.relu);
  const uint32_t tiles_at = smem_address(shared.tiles);
  const uint64_t by_channel = uniform(k_major_descriptor(tiles_at));
  const uint64_t by_row = uniform(mn_major_descriptor(tiles_at, kBlockBytes));
  constexpr int kStageBytes = kC / 64 * kBlockBytes;

  uint32_t rows[kC / 16][4], h[4][4];
  float out[kC / 2], scores[32], dw[2];
  RingPlace<kStages> ahead, ring;  // stage of the next scores, stage of the current tile
  uint32_t rows_parity = 0;

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  const auto start_scores = [&] {
    mbarrier_wait(&shared.full[ahead.index], ahead.parity);
    const uint64_t tile = moved(by_channel, uniform(ahead.index) * kStageBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      wgmma_bf16<kKMajor>(scores, rows[i], tile + i / 4 * (kBlockBytes / 16) + i % 4 * 2, i > 0);
    }
    wgmma_commit();
    ahead.advance();
  };
  const auto free_previous_tile = [&] {
    arrive(&shared.free[ring.index == 0 ? kStages - 1 : ring.index - 1]);
  };
  // Computes h of the current tile and adds to dw.
  const auto make_h = [&](const float (&x)[32]) {
    const float* columns =
        shared.column_factors[ring.index][kGradient == Gradient::kQueries ? warpgroup : 0] + column;
    float row_factor[2];
    if (kGradient == Gradient::kKeys) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_factor[r] = shared.row_factors[ring.index][warpgroup][own_row + 8 * r];
      }
    }
    index_grads::make_h<kGradient>(x, columns, row_factor, relu, dw, h);
  };
  const auto start_product = [&](bool accumulate) {
    const uint64_t tile = moved(by_row, uniform(ring.index) * kStageBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma_bf16<kMNMajor>(out, h[i], tile + i * (2048 / 16), i > 0 || accumulate);
    }
    wgmma_commit();
    ring.advance();
  };

  for (WorkTiles<kGradient> work_tile; work_tile.next(p);) {
    dw[0] = dw[1] = 0.f;
    mbarrier_wait(&shared.rows_full[warpgroup], rows_parity);
    rows_parity ^= 1;
    const uint32_t from = smem_address(shared.rows[warpgroup]) + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      const int chunk = 2 * i + lane / 16;
      load_matrix_x4(from + chunk / 8 * kBlockBytes + ((chunk % 8) ^ (lane % 8)) * 16, rows[i]);
    }
    arrive(&shared.rows_free[warpgroup]);

    const int tiles = work_tile.tiles.last - work_tile.tiles.first;
    start_scores();
    wgmma_wait<0>();
    wgmma_pin(scores);
    for (int tile = 0; tile + 1 < tiles; ++tile) {
      float x[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = scores[i];
      start_scores();
      wgmma_wait<1>();  // waits for the product of the previous tile
      if (tile > 0) free_previous_tile();
      make_h(x);
      start_product(tile > 0);
      wgmma_wait<1>();
      wgmma_pin(scores);
    }
    wgmma_wait<0>();
    if (tiles > 1) free_previous_tile();
    make_h(scores);
    start_product(tiles > 1);
    wgmma_wait<0>();
    wgmma_pin(out);
    free_previous_tile();

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own_row + 8 * r;
      float* to;
      float scale = 1.f;
      bool in_range;
      if constexpr (kGradient == Gradient::kQueries) {
        dw[r] += __shfl_xor_sync(~0u, dw[r], 1);
        dw[r] += __shfl_xor_sync(~0u, dw[r], 2);
        const int64_t at =
            (work_tile.batch * p.queries + work_tile.query + warpgroup) * p.heads + row;
        in_range = row < p.heads && work_tile.query + warpgroup < p.queries;
        if (in_range) scale = __ldg(p.weights + at);
        if (in_range && lane % 4 == 0) p.dweights[at] = dw[r];
        to = p.dq + at * p.channels;
      } else {
        const int key = work_tile.key + warpgroup * kRows + row;
        in_range = key < p.keys;
        to = p.partial_dk +
             ((work_tile.segment * p.batch + work_tile.batch) * p.keys + key) * p.channels;
      }
#pragma unroll
      for (int i = 0; i < kC / 8; ++i) {
        if (in_range && i * 8 < p.channels) {
          *reinterpret_cast<float2*>(to + 8 * i + column) =
              make_float2(out[4 * i + 2 * r] * scale, out[4 * i + 2 * r + 1] * scale);
        }
      }
    }
  }
}

template <int kC, Gradient kGradient>
__global__ void __launch_bounds__(kThreads, 1)
    index_grads_kernel(const __grid_constant__ IndexGradsParams p) {
  constexpr int kConsumer = 208, kProducer = 88;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<Shared<kC>>();
  if (threadIdx.x == 0) {
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
      mbarrier_init(&shared.rows_full[warpgroup], 128);
      mbarrier_init(&shared.rows_free[warpgroup], 4);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], 128 + 4);
      mbarrier_init(&shared.free[i], 8);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup < 2) {
    raise_registers<kConsumer>();
    multiply<kC, kGradient>(p, shared, warpgroup);
  } else {
    lower_registers<kProducer>();
    copy<kC, kGradient>(p, shared);
  }
}

}  // namespace jax_dsa::index_grads
