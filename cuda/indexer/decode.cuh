// Lightning indexer, forward (fwd.cuh) for one to four queries of a request, where reading the keys
// takes longer than any arithmetic on them.
//
// As in fwd.cuh keys are the rows of a product and (query, head) pairs its columns, but a product
// has the columns of the few queries alone, and each of four warpgroups has key tiles of its own:
// of a block's tiles in order, warpgroup g takes g, g + 4, g + 8, ... So the four are at different
// places of the chain product - sums - store, and wait for nothing but their own keys. Their
// queries are the same. Four queries of 64 heads are two products for a tile, one after the other.
//
// Warpgroups: four multiply; a fifth has a warp for each of them that copies its keys (TMA), with
// their scales, and looks up a tile's page while the copy of the tile before it waits for room. The
// first also copies queries, weights and ranges. The -inf where no product is needed is written by
// those that multiply, in the end.
//
// Shared memory: q, one or two items ahead; a ring of key tiles for each warpgroup, 128 KiB in all
// at 128 channels; what else a tile or an item needs lies beside it.
#pragma once

#include <algorithm>

#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "indexer/fwd_plan.cuh"
#include "indexer/fwd_scores.cuh"
#include "indexer/indexer.h"

namespace jax_dsa::indexer {

// kHeads: heads with padding, 16, 32 or 64; kQueries: of an item, so many that they fill a product.
template <IndexerDType kDType_, int kChannels, int kHeads_, int kQueries_, int kWarpgroups_ = 4>
struct DecodeTraits {
  static constexpr IndexerDType kDType = kDType_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kQueries = kQueries_;
  static constexpr int kWarpgroups = kWarpgroups_;  // those that multiply
  static constexpr int kColumns = kQueries * kHeads;
  static constexpr int kN = kColumns < 128 ? kColumns : 128;  // columns of a product
  static constexpr int kOwnQueries = kN / kHeads;             // of a product
  static constexpr int kEarly = 0;
  // As in fwd.cuh; the half is in a key's scale.
  static constexpr bool kSums = kDType == IndexerDType::kE4M3;
  static constexpr int kElementBytes = kDType == IndexerDType::kBF16 ? 2 : 1;
  static constexpr int kChannelBytes = kChannels * kElementBytes;
  static constexpr int kRowBytes = kChannelBytes < 128 ? kChannelBytes : 128;
  static constexpr int kBlocks = kChannelBytes / kRowBytes;
  static constexpr int kQBytes = kN * kChannelBytes;  // of a product
  static constexpr int kKeyBytes = kTile * kChannelBytes;
  static constexpr int kQStages = kColumns * kChannelBytes > 32 * 1024 ? 1 : 2;
  static constexpr int kKeyStages = std::min(128 * 1024 / (kWarpgroups * kKeyBytes), 8);
  static constexpr int kMathThreads = kWarpgroups * 128, kThreads = kMathThreads + 128;
  static constexpr int kMathRegisters = kWarpgroups == 4 ? 104 : 200;
  static constexpr int kOtherRegisters = kWarpgroups == 4 ? 64 : 96;
  static_assert(registers_fit(1, kWarpgroups, kMathRegisters, kOtherRegisters));
  static constexpr int kFillWarps = kMathThreads / 32;
  static_assert(kN == 64 || kN == 128);
};

template <typename Tr>
struct alignas(1024) DecodeShared {
  uint8_t q[Tr::kQStages][Tr::kBlocks][Tr::kColumns * Tr::kRowBytes];
  uint8_t k[Tr::kWarpgroups][Tr::kKeyStages][Tr::kBlocks][kTile * Tr::kRowBytes];
  float k_scale[Tr::kWarpgroups][Tr::kKeyStages][kTile];
  float weights[Tr::kQStages][Tr::kColumns];
  int starts[Tr::kQStages][Tr::kQueries], ends[Tr::kQStages][Tr::kQueries];
  int has_page[Tr::kWarpgroups][Tr::kKeyStages];
  uint64_t q_full[Tr::kQStages], q_free[Tr::kQStages];
  uint64_t k_full[Tr::kWarpgroups][Tr::kKeyStages], k_free[Tr::kWarpgroups][Tr::kKeyStages];
  int64_t warp_sums[Tr::kThreads / 32];
  Share share;
};

// The copying lanes' arrivals: each one's own 4-byte copies, and the first one's for TMA.
inline constexpr int kCopyArrivals = 33;

// The products that an item's queries take.
template <typename Tr>
__device__ __forceinline__ int products(int queries) {
  return ceil_div(queries, Tr::kOwnQueries);
}

// ---- copies ------------------------------------------------------------------------------------

// An item's queries, weights and ranges; by a warp.
template <typename Tr>
__device__ __forceinline__ void copy_queries(const IndexerFwdParams& p, const CUtensorMap& q_map,
                                             DecodeShared<Tr>& shared, int stage, int64_t batch,
                                             int64_t query) {
  constexpr int kRowElements = Tr::kRowBytes / Tr::kElementBytes;
  const int lane = threadIdx.x % 32;
  const int queries = static_cast<int>(min(p.queries - query, int64_t{Tr::kQueries}));
  const int64_t token = batch * p.queries + query;
#pragma unroll
  for (int i = 0; i < Tr::kColumns; i += 32) {
    const int column = i + lane, own = column / Tr::kHeads, head = column % Tr::kHeads;
    const bool there = own < queries && head < p.heads;
    cp_async_4(smem_address(&shared.weights[stage][column]),
               p.weights + (there ? (token + own) * p.heads + head : 0), there);
  }
  if (lane < Tr::kQueries) {
    const bool there = lane < queries;
    cp_async_4(smem_address(&shared.starts[stage][lane]), p.starts + (there ? token + lane : 0),
               there);
    cp_async_4(smem_address(&shared.ends[stage][lane]), p.ends + (there ? token + lane : 0), there);
  }
  cp_async_arrive(&shared.q_full[stage]);
  if (lane > 0) return;
  mbarrier_arrive_expect(&shared.q_full[stage], products<Tr>(queries) * Tr::kQBytes);
  for (int i = 0; i < products<Tr>(queries); ++i) {
#pragma unroll
    for (int block = 0; block < Tr::kBlocks; ++block) {
      tma_load(shared.q[stage][block] + i * Tr::kN * Tr::kRowBytes, &q_map, &shared.q_full[stage],
               block * kRowElements, 0, static_cast<int>(query) + i * Tr::kOwnQueries,
               static_cast<int>(batch));
    }
  }
}

// The tiles of warpgroup `group`; by a warp.
template <typename Tr>
__device__ void copy(const IndexerFwdParams& p, const CUtensorMap& q_map, const CUtensorMap& k_map,
                     DecodeShared<Tr>& shared, int group) {
  constexpr int kRowElements = Tr::kRowBytes / Tr::kElementBytes;
  const int lane = threadIdx.x % 32;
  const uint64_t once = l2_policy_evict_first();  // so that the logits stay in the L2
  const bool paged = p.page_table != nullptr;
  RingPlace<Tr::kQStages> q_at = {0, 1};  // of what comes next, as `free` counts
  RingPlace<Tr::kKeyStages> k_at = {0, 1};
  int own = group;  // the warpgroup's next tile, counted from the item's first
  for (Walk<Tr> walk(p, shared.share); walk.next();) {
    if (group == 0) {
      mbarrier_wait(&shared.q_free[q_at.index], q_at.parity);
      copy_queries(p, q_map, shared, q_at.index, walk.batch, walk.query);
      q_at.advance();
    }
    const int batch = static_cast<int>(walk.batch), pool = paged && p.pools == 1 ? 0 : batch;
    const int64_t pool_rows = paged ? int64_t{p.pages} * p.page_size : p.keys;
    const float* scales = p.k_scale + (p.k_scale ? pool * pool_rows : 0);
    const auto page_of = [&](int tile) {
      const bool needed = paged && tile < walk.tiles.last;
      return load_now(needed ? page_entry(p, walk.batch, tile) : nullptr, needed, -1);
    };
    int tile = walk.tiles.first + own;
    int page = page_of(tile);
    for (; tile < walk.tiles.last; tile += Tr::kWarpgroups) {
      const bool has_page = !paged || is_page(p, page);
      const int row = paged ? row_in_pool(p, tile, page) : tile * kTile;
      page = page_of(tile + Tr::kWarpgroups);
      uint64_t* const full = &shared.k_full[group][k_at.index];
      mbarrier_wait(&shared.k_free[group][k_at.index], k_at.parity);
      if (lane == 0) {
        shared.has_page[group][k_at.index] = has_page;
        mbarrier_arrive_expect(full, Tr::kKeyBytes);
#pragma unroll
        for (int block = 0; block < Tr::kBlocks; ++block) {
          tma_load(shared.k[group][k_at.index][block], &k_map, full, block * kRowElements, row,
                   pool, once);
        }
      }
      if (p.k_scale) {
#pragma unroll
        for (int i = lane; i < kTile; i += 32) {
          const bool there = row + i < pool_rows;
          cp_async_4(smem_address(&shared.k_scale[group][k_at.index][i]),
                     scales + (there ? row + i : 0), there);
        }
      }
      cp_async_arrive(full);
      k_at.advance();
    }
    own = tile - walk.tiles.last;
  }
}

// ---- products ----------------------------------------------------------------------------------

template <typename Tr>
__device__ void math(const IndexerFwdParams& p, DecodeShared<Tr>& shared, int group) {
  constexpr int kOwn = Tr::kOwnQueries;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int own_row = warp * 16 + lane / 4 + lane % 2 * 8, own_query = lane / 2 % 2;
  const int keys = static_cast<int>(p.keys);
  const uint64_t q = uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.q)));
  const uint64_t k = uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.k[group])));
  RingPlace<Tr::kQStages> q_at;  // of what comes next
  RingPlace<Tr::kKeyStages> k_at;
  int own = group;  // the warpgroup's next tile, counted from the item's first
  for (Walk<Tr> walk(p, shared.share); walk.next();) {
    const int queries = static_cast<int>(min(p.queries - walk.query, int64_t{Tr::kQueries}));
    float* const out = p.out + (walk.batch * p.queries + walk.query) * p.keys;
    mbarrier_wait(&shared.q_full[q_at.index], q_at.parity);
    int tile = walk.tiles.first + own;
    for (; tile < walk.tiles.last; tile += Tr::kWarpgroups) {
      mbarrier_wait(&shared.k_full[group][k_at.index], k_at.parity);
      const int key = tile * kTile + own_row;
      float scale = p.k_scale ? shared.k_scale[group][k_at.index][own_row] : 1.f;
      if (Tr::kSums) scale *= 0.5f;
      const bool has_page = shared.has_page[group][k_at.index];
      for (int i = 0; i < products<Tr>(queries); ++i) {
        float x[Tr::kN / 2];
        wgmma_fence();
        multiply<Tr>(
            x, moved(k, k_at.index * Tr::kKeyBytes),
            moved(q, q_at.index * Tr::kColumns * Tr::kChannelBytes + i * Tr::kN * Tr::kRowBytes));
        wgmma_wait<0>();
        wgmma_pin(x);
        if (i + 1 == products<Tr>(queries)) {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(&shared.k_free[group][k_at.index]);
        }
        float w[Tr::kN / 4];
#pragma unroll
        for (int j = 0; j < Tr::kN / 8; ++j) {
          const auto* of = &shared.weights[q_at.index][i * Tr::kN + j * 8 + lane % 4 * 2];
          w[2 * j] = of[0], w[2 * j + 1] = of[1];
        }
        float sum[ceil_div(kOwn, 2)];
        if (p.relu) {
          sum_heads<Tr, true>(x, w, lane, sum);
        } else {
          sum_heads<Tr, false>(x, w, lane, sum);
        }
#pragma unroll
        for (int h = 0; h < ceil_div(kOwn, 2); ++h) {
          const int of_product = 2 * h + own_query, query = i * kOwn + of_product;
          if (of_product >= kOwn || query >= queries || key >= keys) continue;
          const bool seen = key >= shared.starts[q_at.index][query] &&
                            key < shared.ends[q_at.index][query] && has_page;
          out[query * p.keys + key] = seen ? sum[h] * scale : -INFINITY;
        }
      }
      k_at.advance();
    }
    own = tile - walk.tiles.last;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.q_free[q_at.index]);
    q_at.advance();
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    decode_kernel(const IndexerFwdParams p, const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map) {
  auto& shared = dynamic_shared<DecodeShared<Tr>>();
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    for (int i = 0; i < Tr::kQStages; ++i) {
      mbarrier_init(&shared.q_full[i], kCopyArrivals);
      mbarrier_init(&shared.q_free[i], Tr::kMathThreads / 32);
    }
    for (int i = 0; i < Tr::kWarpgroups * Tr::kKeyStages; ++i) {
      mbarrier_init(&shared.k_full[0][i], kCopyArrivals);
      mbarrier_init(&shared.k_free[0][i], 4);
    }
    mbarrier_init_fence();
  }
  find_share<Tr>(p, shared);
  const int group = uniform(static_cast<int>(threadIdx.x / 128));
  if (group < Tr::kWarpgroups) {
    raise_registers<Tr::kMathRegisters>();
    math<Tr>(p, shared, group);
    if (p.whole_rows) fill<Tr>(p, threadIdx.x / 32);
  } else {
    lower_registers<Tr::kOtherRegisters>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp < Tr::kWarpgroups) copy<Tr>(p, q_map, k_map, shared, warp);
  }
}

}  // namespace jax_dsa::indexer
