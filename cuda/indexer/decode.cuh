// Lightning indexer, forward pass (see fwd.cuh) for one to four queries per request. Reading the
// keys takes longer than any arithmetic on them.
//
// As in fwd.cuh, keys are the M dimension of the MMA and (query, head) pairs its N dimension. Here
// one product has only the columns of these few queries, and each of the four consumer warpgroups
// has key tiles of its own: warpgroup g takes the tiles g, g + 4, g + 8, ... of the CTA's work
// range, in order. The warpgroups are thus in different phases of the chain product, sums, store,
// and each waits only for its own keys. They share the queries. Four queries of 64 heads take two
// products per tile, one after the other.
//
// Warpgroups. Four consumers, and a fifth with one producer warp for each of them. A producer warp
// copies the keys (TMA) and their scales. It looks up the page of the next tile while the copy of
// the current one waits for a free stage. The first producer warp also copies queries, weights and
// ranges. At the end the consumers store -inf where no product was needed.
//
// Shared memory: Q of one or two work tiles; a ring of key tiles for each consumer, 128 KiB in all
// at 128 channels; scales, weights and ranges beside them.
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

// kHeads is the padded number of heads: 16, 32 or 64. kQueries is the number of queries per work
// tile, enough to fill a product.
template <IndexerDType kDType_, int kChannels, int kHeads_, int kQueries_, int kWarpgroups_ = 4>
struct DecodeTraits {
  static constexpr IndexerDType kDType = kDType_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kQueries = kQueries_;
  static constexpr int kWarpgroups = kWarpgroups_;  // consumers
  static constexpr int kColumns = kQueries * kHeads;
  static constexpr int kN = kColumns < 128 ? kColumns : 128;  // columns of a product
  static constexpr int kOwnQueries = kN / kHeads;             // queries per product
  static constexpr int kEarlySteps = 0;
  // As in fwd.cuh, but the factor 1/2 is in the scale of a key.
  static constexpr bool kReluBySum = kDType == IndexerDType::kE4M3;
  static constexpr int kElementBytes = kDType == IndexerDType::kBF16 ? 2 : 1;
  static constexpr int kChannelBytes = kChannels * kElementBytes;
  static constexpr int kRowBytes = kChannelBytes < 128 ? kChannelBytes : 128;
  static constexpr int kBlocks = kChannelBytes / kRowBytes;
  static constexpr int kQBytes = kN * kChannelBytes;  // bytes of Q per product
  static constexpr int kKeyBytes = kTile * kChannelBytes;
  static constexpr int kQStages = kColumns * kChannelBytes > 32 * 1024 ? 1 : 2;
  static constexpr int kKeyStages = std::min(128 * 1024 / (kWarpgroups * kKeyBytes), 8);
  static constexpr int kConsumerThreads = kWarpgroups * 128, kThreads = kConsumerThreads + 128;
  static constexpr int kConsumerRegisters = kWarpgroups == 4 ? 104 : 200;
  static constexpr int kProducerRegisters = kWarpgroups == 4 ? 64 : 96;
  static_assert(registers_fit(1, kWarpgroups, kConsumerRegisters, kProducerRegisters));
  static constexpr int kFillWarps = kConsumerThreads / 32;
  static_assert(kN == 64 || kN == 128);
};

template <typename Tr>
struct alignas(1024) DecodeShared {
  uint8_t q[Tr::kQStages][Tr::kBlocks][Tr::kColumns * Tr::kRowBytes];
  uint8_t k[Tr::kWarpgroups][Tr::kKeyStages][Tr::kBlocks][kTile * Tr::kRowBytes];
  float k_scale[Tr::kWarpgroups][Tr::kKeyStages][kTile];
  float weights[Tr::kQStages][Tr::kColumns];
  int starts[Tr::kQStages][Tr::kQueries], ends[Tr::kQStages][Tr::kQueries];
  int is_mapped[Tr::kWarpgroups][Tr::kKeyStages];
  uint64_t q_full[Tr::kQStages], q_free[Tr::kQStages];
  uint64_t k_full[Tr::kWarpgroups][Tr::kKeyStages], k_free[Tr::kWarpgroups][Tr::kKeyStages];
  int64_t warp_sums[Tr::kThreads / 32];
  WorkRange work_range;
};

// Arrivals of a producer warp on a `full` barrier: one per lane for its 4-byte copies, and one more
// of the first lane for TMA.
inline constexpr int kCopyArrivals = 33;

// Returns the number of products that `queries` queries take.
template <typename Tr>
__device__ __forceinline__ int product_count(int queries) {
  return ceil_div(queries, Tr::kOwnQueries);
}

// ---- copies ------------------------------------------------------------------------------------

// Copies the queries, weights and ranges of a work tile. One warp calls it.
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
    const bool in_bounds = own < queries && head < p.heads;
    cp_async_4(smem_address(&shared.weights[stage][column]),
               p.weights + (in_bounds ? (token + own) * p.heads + head : 0), in_bounds);
  }
  if (lane < Tr::kQueries) {
    const bool in_bounds = lane < queries;
    cp_async_4(smem_address(&shared.starts[stage][lane]), p.starts + (in_bounds ? token + lane : 0),
               in_bounds);
    cp_async_4(smem_address(&shared.ends[stage][lane]), p.ends + (in_bounds ? token + lane : 0),
               in_bounds);
  }
  cp_async_arrive(&shared.q_full[stage]);
  if (lane > 0) return;
  mbarrier_arrive_expect(&shared.q_full[stage], product_count<Tr>(queries) * Tr::kQBytes);
  for (int i = 0; i < product_count<Tr>(queries); ++i) {
#pragma unroll
    for (int block = 0; block < Tr::kBlocks; ++block) {
      tma_load(shared.q[stage][block] + i * Tr::kN * Tr::kRowBytes, &q_map, &shared.q_full[stage],
               block * kRowElements, 0, static_cast<int>(query) + i * Tr::kOwnQueries,
               static_cast<int>(batch));
    }
  }
}

// The loop of the producer warp that copies the key tiles of consumer `warpgroup`.
template <typename Tr>
__device__ void produce(const IndexerFwdParams& p, const CUtensorMap& q_map,
                        const CUtensorMap& k_map, DecodeShared<Tr>& shared, int warpgroup) {
  constexpr int kRowElements = Tr::kRowBytes / Tr::kElementBytes;
  const int lane = threadIdx.x % 32;
  // Keys are read once. The logits, which top-k reads next, should stay in the L2 cache.
  const uint64_t policy = l2_policy_evict_first();
  const bool paged = p.page_table != nullptr;
  RingPlace<Tr::kQStages> q_at = {0, 1};  // the next stages, with the parities of `free`
  RingPlace<Tr::kKeyStages> k_at = {0, 1};
  int own = warpgroup;  // the warpgroup's next key tile, counted from the work tile's first one
  for (Walk<Tr> walk(p, shared.work_range); walk.next();) {
    if (warpgroup == 0) {
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
      const bool is_mapped = !paged || is_mapped_page(p, page);
      const int row = paged ? row_in_pool(p, tile, page) : tile * kTile;
      page = page_of(tile + Tr::kWarpgroups);
      uint64_t* const full = &shared.k_full[warpgroup][k_at.index];
      mbarrier_wait(&shared.k_free[warpgroup][k_at.index], k_at.parity);
      if (lane == 0) {
        shared.is_mapped[warpgroup][k_at.index] = is_mapped;
        mbarrier_arrive_expect(full, Tr::kKeyBytes);
#pragma unroll
        for (int block = 0; block < Tr::kBlocks; ++block) {
          tma_load(shared.k[warpgroup][k_at.index][block], &k_map, full, block * kRowElements, row,
                   pool, policy);
        }
      }
      if (p.k_scale) {
#pragma unroll
        for (int i = lane; i < kTile; i += 32) {
          const bool in_bounds = row + i < pool_rows;
          cp_async_4(smem_address(&shared.k_scale[warpgroup][k_at.index][i]),
                     scales + (in_bounds ? row + i : 0), in_bounds);
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
__device__ void consume(const IndexerFwdParams& p, DecodeShared<Tr>& shared, int warpgroup) {
  constexpr int kOwnQueries = Tr::kOwnQueries;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int own_row = warp * 16 + lane / 4 + lane % 2 * 8, own_query = lane / 2 % 2;
  const int keys = static_cast<int>(p.keys);
  const uint64_t q = uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.q)));
  const uint64_t k =
      uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.k[warpgroup])));
  RingPlace<Tr::kQStages> q_at;
  RingPlace<Tr::kKeyStages> k_at;
  int own = warpgroup;  // the warpgroup's next key tile, counted from the work tile's first one
  for (Walk<Tr> walk(p, shared.work_range); walk.next();) {
    const int queries = static_cast<int>(min(p.queries - walk.query, int64_t{Tr::kQueries}));
    float* const out = p.out + (walk.batch * p.queries + walk.query) * p.keys;
    mbarrier_wait(&shared.q_full[q_at.index], q_at.parity);
    int tile = walk.tiles.first + own;
    for (; tile < walk.tiles.last; tile += Tr::kWarpgroups) {
      mbarrier_wait(&shared.k_full[warpgroup][k_at.index], k_at.parity);
      const int key = tile * kTile + own_row;
      float scale = p.k_scale ? shared.k_scale[warpgroup][k_at.index][own_row] : 1.f;
      if (Tr::kReluBySum) scale *= 0.5f;
      const bool is_mapped = shared.is_mapped[warpgroup][k_at.index];
      for (int i = 0; i < product_count<Tr>(queries); ++i) {
        float x[Tr::kN / 2];
        wgmma_fence();
        multiply<Tr>(
            x, moved(k, k_at.index * Tr::kKeyBytes),
            moved(q, q_at.index * Tr::kColumns * Tr::kChannelBytes + i * Tr::kN * Tr::kRowBytes));
        wgmma_wait<0>();
        wgmma_pin(x);
        if (i + 1 == product_count<Tr>(queries)) {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(&shared.k_free[warpgroup][k_at.index]);
        }
        float w[Tr::kN / 4];
#pragma unroll
        for (int j = 0; j < Tr::kN / 8; ++j) {
          const auto* source = &shared.weights[q_at.index][i * Tr::kN + j * 8 + lane % 4 * 2];
          w[2 * j] = source[0], w[2 * j + 1] = source[1];
        }
        float sum[ceil_div(kOwnQueries, 2)];
        if (p.relu) {
          sum_heads<Tr, true>(x, w, lane, sum);
        } else {
          sum_heads<Tr, false>(x, w, lane, sum);
        }
#pragma unroll
        for (int h = 0; h < ceil_div(kOwnQueries, 2); ++h) {
          const int product_query = 2 * h + own_query, query = i * kOwnQueries + product_query;
          if (product_query >= kOwnQueries || query >= queries || key >= keys) continue;
          const bool seen = key >= shared.starts[q_at.index][query] &&
                            key < shared.ends[q_at.index][query] && is_mapped;
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
      mbarrier_init(&shared.q_free[i], Tr::kConsumerThreads / 32);
    }
    for (int i = 0; i < Tr::kWarpgroups * Tr::kKeyStages; ++i) {
      mbarrier_init(&shared.k_full[0][i], kCopyArrivals);
      mbarrier_init(&shared.k_free[0][i], 4);
    }
    mbarrier_init_fence();
  }
  find_work_range<Tr>(p, shared);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x / 128));
  if (warpgroup < Tr::kWarpgroups) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr>(p, shared, warpgroup);
    if (p.whole_rows) fill<Tr>(p, threadIdx.x / 32);
  } else {
    lower_registers<Tr::kProducerRegisters>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp < Tr::kWarpgroups) produce<Tr>(p, q_map, k_map, shared, warp);
  }
}

}  // namespace jax_dsa::indexer
