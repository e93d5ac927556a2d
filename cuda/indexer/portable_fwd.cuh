// Lightning indexer, forward pass, with instructions of sm_80. fwd.cuh has the mathematics.
//
// Tiling. A CTA takes 256 keys of a request and up to 64 query tiles. A query tile has 64 rows,
// which are the heads of one to four queries, padded to a multiple of 16. Each of the four warps
// holds 64 keys in registers as the left operand. The query tiles pass through two buffers:
// cp.async fills one while the warps multiply the other. Each tile has one barrier. Two CTAs share
// an SM.
//
// Sums. A warp multiplies its keys with 16 heads at a time. Each accumulator takes a ReLU and an
// FMA; the sum over heads stays within a thread except for its last step, which goes over four
// lanes.
//
// Query tiles that see none of the keys are skipped, and so are the products of a warp whose keys a
// query does not see, or whose page is unmapped. A page holds a multiple of 64 keys, so a warp has
// keys of one page.
//
// Shared memory for 256 bytes of channels: 2 query tiles of 16 KiB, in which the keys lie at first.
// This is the same on every GPU.
#pragma once

#include "indexer/fwd_plan.cuh"
#include "indexer/portable_scores.cuh"

namespace jax_dsa::indexer {

inline constexpr int kMaxQueryTiles = 64, kMaxTileQueries = kTileRows / kPairRows;

// How the work is divided into CTAs.
struct PortablePlan {
  int tile_queries;      // queries of a query tile
  int query_tiles;       // query tiles of a CTA, at most kMaxQueryTiles
  int64_t key_tiles;     // of kCtaRows keys, per request
  int64_t query_ranges;  // of tile_queries * query_tiles queries, per request
};

template <typename Tr>
struct alignas(128) PortableFwdShared {
  uint8_t tiles[2][Tr::kTileBytes];  // the warps' keys, then queries
  float weights[2][kTileRows];
  int starts[kMaxQueryTiles * kMaxTileQueries], ends[kMaxQueryTiles * kMaxTileQueries];
  uint32_t visible[kMaxQueryTiles / 32];  // one bit per query tile that sees a key
};

template <typename Tr>
__global__ void __launch_bounds__(kPortableThreads, 2)
    portable_fwd_kernel(const __grid_constant__ IndexerFwdParams p,
                        const __grid_constant__ PortablePlan plan) {
  auto& shared = dynamic_shared<PortableFwdShared<Tr>>();
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int keys = static_cast<int>(p.keys);
  // CTAs that run at the same time share queries.
  const int64_t rest = blockIdx.x / plan.key_tiles, batch = rest / plan.query_ranges;
  const int first_key = static_cast<int>(blockIdx.x - rest * plan.key_tiles) * kCtaRows;
  const int range_queries = plan.query_tiles * plan.tile_queries;
  const int64_t query = (rest - batch * plan.query_ranges) * range_queries;
  const int64_t token = batch * p.queries + query;
  const int queries = static_cast<int>(min(p.queries - query, int64_t{range_queries}));
  const int warp_key = first_key + warp * kHeldRows;

  // ---- ranges
  for (int i = threadIdx.x; i < queries; i += kPortableThreads) {
    shared.starts[i] = max(__ldg(p.starts + token + i), 0);
    shared.ends[i] = min(__ldg(p.ends + token + i), keys);
  }
  __syncthreads();
  const auto sees = [&](int i, int first, int count) {  // whether a query sees any of these keys
    return shared.starts[i] < min(shared.ends[i], first + count) && shared.ends[i] > first;
  };
  if (threadIdx.x < kMaxQueryTiles) {
    bool any = false;
    const int tile = threadIdx.x * plan.tile_queries;
    for (int i = tile; i < min(tile + plan.tile_queries, queries); ++i) {
      any |= sees(i, first_key, kCtaRows);
    }
    const uint32_t bits = __ballot_sync(~0u, any && threadIdx.x < plan.query_tiles);
    if (lane == 0) shared.visible[warp] = bits;
  }
  __syncthreads();
  uint64_t left = shared.visible[0] | uint64_t{shared.visible[1]} << 32;
  if (p.whole_rows) {
    for (int i = warp; i < queries; i += kPortableWarps) {
      if (left >> i / plan.tile_queries & 1) continue;
      fill_row(p.out + (token + i) * p.keys, first_key, min(first_key + kCtaRows, keys));
    }
  }
  if (left == 0) return;

  // ---- keys
  const bool paged = p.page_table != nullptr;
  int64_t key_row = batch * p.keys + warp_key;  // the row of the warp's first key, in all pools
  bool mapped = warp_key < keys;
  if (paged && mapped) {
    const int page = __ldg(page_entry(p, batch, warp_key / kTile));
    mapped = is_mapped_page(p, page);
    key_row = (p.pools == 1 ? 0 : batch) * int64_t{p.pages} * p.page_size +
              row_in_pool(p, warp_key / kTile, page);
  }
  HeldRows<Tr> held;
  const char* const k = static_cast<const char*>(p.k) + (mapped ? key_row * Tr::kChannelBytes : 0);
  hold_rows(held, smem_address(shared.tiles) + warp * (Tr::kTileBytes / 2), p.q, [&](int r) {
    return mapped && warp_key + r < keys ? k + r * Tr::kChannelBytes : nullptr;
  });
  float scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool exists = p.k_scale != nullptr && mapped && warp_key + own_row(i) < keys;
    scale[i] = exists ? __ldg(p.k_scale + key_row + own_row(i)) : 1.f;
  }
  __syncthreads();  // the tiles are free for queries

  // ---- query tiles
  const auto next_tile = [&] {
    const int tile = __ffsll(static_cast<int64_t>(left)) - 1;
    left &= left - 1;
    return tile;
  };
  const auto load = [&](int tile, int buffer) {
    const int first = tile * plan.tile_queries;
    load_heads<Tr>(p, token + first, plan.tile_queries, queries - first,
                   smem_address(shared.tiles[buffer]), shared.weights[buffer]);
    cp_async_commit();
  };
  const float floor = p.relu ? 0.f : -INFINITY;
  const int padded = padded_heads(p.heads);
  int tile = next_tile(), buffer = 0;
  load(tile, 0);
#pragma unroll 1
  while (tile >= 0) {
    const int upcoming = next_tile();
    cp_async_wait_group<0>();
    __syncthreads();
    if (upcoming >= 0) load(upcoming, buffer ^ 1);
    const int first = tile * plan.tile_queries;
#pragma unroll 1
    for (int j = 0; j < min(plan.tile_queries, queries - first); ++j) {
      const int i = first + j;
      float sum[2] = {};
      if (mapped && sees(i, warp_key, kHeldRows)) {
        score_keys(held, smem_address(shared.tiles[buffer]), shared.weights[buffer], j * padded,
                   padded, floor, sum);
      }
      float* const out = p.out + (token + i) * p.keys;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int key = warp_key + own_row(n);
        const bool seen = mapped && key >= shared.starts[i] && key < shared.ends[i];
        if (key < keys) __stcs(out + key, seen ? sum[n] * scale[n] : -INFINITY);
      }
    }
    buffer ^= 1;
    tile = upcoming;
  }
}

}  // namespace jax_dsa::indexer
