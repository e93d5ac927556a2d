// Lightning indexer inside candidate blocks: the logits of candidate keys, with instructions of
// sm_80. candidate_lists.cuh says how the candidate keys of a query are numbered.
//
// A CTA takes a segment of one query's row and keeps the query's heads in shared memory. Each of
// its four warps takes every fourth tile of 64 keys: it gathers the keys into registers, 32 at a
// time, and multiplies them with the heads. Warps do not wait for each other, so while one gathers,
// others multiply. Products and sums are those of portable_fwd.cuh, and so are the bits of a logit.
//
// CTAs are numbered segment by segment, so that those that run at the same time read neighbouring
// keys, which the L2 cache then holds.
//
// Shared memory for 256 bytes of channels: the heads 16 KiB, 8 KiB of keys for each warp. Two CTAs
// share an SM.
#pragma once

#include "indexer/candidates.h"
#include "indexer/fwd_plan.cuh"
#include "indexer/portable_scores.cuh"

namespace jax_dsa::indexer {

template <typename Tr>
struct alignas(128) PortableCandidateShared {
  uint8_t heads[Tr::kTileBytes];
  uint8_t keys[kPortableWarps][Tr::kTileBytes / 2];
  float weights[kTileRows];
};

// segment_tiles: tiles of a segment.
template <typename Tr>
__global__ void __launch_bounds__(kPortableThreads, 2)
    portable_candidate_kernel(const __grid_constant__ IndexerFwdParams p,
                              const __grid_constant__ CandidateRows x, int segment_tiles) {
  auto& shared = dynamic_shared<PortableCandidateShared<Tr>>();
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const auto segment = static_cast<int>(blockIdx.x / x.rows);
  const int64_t row = blockIdx.x - segment * x.rows;
  const int count = x.counts ? __ldg(x.counts + row) : static_cast<int>(x.size);  // candidate keys
  const int first = segment * segment_tiles;
  const int last = min(first + segment_tiles, ceil_div(count, kHeldRows));
  if (first >= last) return;
  const int64_t token = x.first_token + row, batch = token / p.queries;
  const uint32_t heads = smem_address(shared.heads);
  load_heads<Tr>(p, token, 1, 1, heads, shared.weights);
  cp_async_commit();
  cp_async_wait_group<0>();
  __syncthreads();

  const bool paged = p.page_table != nullptr;
  const int64_t pool_rows = paged ? int64_t{p.pages} * p.page_size : p.keys;
  const int64_t before = (paged && p.pools == 1 ? 0 : batch) * pool_rows;  // rows of k
  const char* const k = static_cast<const char*>(p.k) + before * Tr::kChannelBytes;
  const float* const scales = p.k_scale + (p.k_scale ? before : 0);
  const int32_t* const list = x.lists + row * x.list_size;
  float* const out = x.logits + row * x.size;
  const float floor = p.relu ? 0.f : -INFINITY;
#pragma unroll 1
  for (int tile = first + warp; tile < last; tile += kPortableWarps) {
    int index[2];  // rows of k that this lane finds, -1 for none
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = tile * kHeldRows + i * 32 + lane;
      index[i] = -1;
      if (at >= count) continue;
      const int block = at / x.block_size;
      const int key = __ldg(list + block) + at - block * x.block_size;
      if (static_cast<uint32_t>(key) >= static_cast<uint32_t>(p.keys)) continue;
      index[i] = key;
      if (!paged) continue;
      const int page = __ldg(page_entry(p, batch, index[i] / kTile));
      index[i] = is_mapped_page(p, page) ? page * p.page_size + index[i] % p.page_size : -1;
    }
    const auto index_of = [&](int r) {
      const int low = __shfl_sync(~0u, index[0], r % 32), high = __shfl_sync(~0u, index[1], r % 32);
      return r < 32 ? low : high;
    };
    HeldRows<Tr> held;
    hold_rows(held, smem_address(shared.keys[warp]), p.q, [&](int r) {
      const int from = index_of(r);
      return from >= 0 ? k + int64_t{from} * Tr::kChannelBytes : nullptr;
    });
    float sum[2];
    score_keys(held, heads, shared.weights, 0, padded_heads(p.heads), floor, sum);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = index_of(own_row(i)), at = tile * kHeldRows + own_row(i);
      const float scale = p.k_scale && from >= 0 ? __ldg(scales + from) : 1.f;
      if (at < count) __stcs(out + at, from >= 0 ? sum[i] * scale : -INFINITY);
    }
  }
}

}  // namespace jax_dsa::indexer
