// Lightning indexer, forward: for every query t and key s
//
//     out[t,s] = k_scale[s] * sum_j w[t,j] * relu(q[t,j] . k[s])    if starts[t] <= s < ends[t]
//                -inf                                               otherwise
//
// Keys are the rows of a product and (query, head) pairs its columns: a warpgroup multiplies a tile
// of 64 keys with kN columns: 128 are 2 queries of 64 heads, 256 are 8 of 32 or 16 of 16 (fewer
// heads are padded with weight 0). A column's weight is the same for all keys, so that the weights
// of a warpgroup's queries stay in registers, kN / 4 a thread. What follows the product is then a
// relu and an FMA for every accumulator, and the sum over heads is in each thread but for the last
// step over four lanes.
//
// Warpgroups: four of kN = 128 multiply, or two of 256, each with its own queries and all with the
// same keys. They are pairs of which one multiplies while the other is in its sums. The last has
// one warp that copies queries and keys (TMA), and three that write -inf where no product is
// needed.
//
// Work: `kQueries` queries, all warpgroups', are an item; the items' key tiles are dealt out as
// fwd_plan.cuh says.
//
// Shared memory: q, one or two items ahead (64 KiB each in fp8, 128 KiB in bf16, at 128 channels);
// keys in a ring of tiles, 8 or 6. Rows of 128 bytes or less, swizzled; wider rows in blocks.
#pragma once

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

// kHeads: heads with padding, 16, 32 or 64; kPaged: keys in pages of whole tiles.
template <IndexerDType kDType_, int kChannels, int kHeads_, bool kPaged_>
struct Traits {
  static constexpr bool kPaged = kPaged_;
  // Those that multiply. Four have no registers for many queries each.
  static constexpr int kWarpgroups = kHeads_ == 64 ? 4 : 2;
  static constexpr int kN = 512 / kWarpgroups;  // columns of a warpgroup's product
  static constexpr int kColumns = kN * kWarpgroups;
  // How many steps before its product's end a warpgroup lets its partner multiply. A second pair
  // of warpgroups fills the gap that two taking strict turns leave.
  static constexpr int kEarly = kWarpgroups == 2 ? 1 : 0;
  // relu(x) as (x + |x|) / 2, half of it in the weights: additions run at twice the rate of maxima.
  // It makes NaN of -inf, which products of e4m3 cannot be.
  static constexpr bool kSums = kDType_ == IndexerDType::kE4M3;
  static constexpr IndexerDType kDType = kDType_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kElementBytes = kDType == IndexerDType::kBF16 ? 2 : 1;
  static constexpr int kChannelBytes = kChannels * kElementBytes;
  static constexpr int kRowBytes = kChannelBytes < 128 ? kChannelBytes : 128;
  static constexpr int kBlocks = kChannelBytes / kRowBytes;
  static constexpr int kOwnQueries = kN / kHeads;  // of a warpgroup
  static constexpr int kQueries = kOwnQueries * kWarpgroups;
  static constexpr int kQBytes = kColumns * kChannelBytes;
  static constexpr int kKeyBytes = kTile * kChannelBytes;
  static constexpr int kQStages = kQBytes > 64 * 1024 ? 1 : 2;
  static constexpr int kKeyStages = kKeyBytes > 8 * 1024 ? 6 : 8;
  static constexpr int kMathThreads = kWarpgroups * 128, kThreads = kMathThreads + 128;
  static constexpr int kMathRegisters = kWarpgroups == 2 ? 224 : 112;
  static constexpr int kOtherRegisters = kWarpgroups == 2 ? 56 : 32;
  static_assert(registers_fit(1, kWarpgroups, kMathRegisters, kOtherRegisters));
  static constexpr int kFillWarps = 3;
  static_assert(kQueries <= 32 && kOwnQueries >= 2);
};

// 0 is __syncthreads; a warpgroup's turn to multiply is the barrier kTurn plus its number.
enum NamedBarrier { kTurn = 1 };

template <typename Tr>
struct alignas(1024) Shared {
  uint8_t q[Tr::kQStages][Tr::kBlocks][Tr::kWarpgroups][Tr::kN * Tr::kRowBytes];
  uint8_t k[Tr::kKeyStages][Tr::kBlocks][kTile * Tr::kRowBytes];
  uint64_t q_full[Tr::kQStages], q_free[Tr::kQStages];
  uint64_t k_full[Tr::kKeyStages], k_free[Tr::kKeyStages];
  int64_t warp_sums[Tr::kThreads / 32];
  Share share;
};

// ---- copies ------------------------------------------------------------------------------------

template <typename Tr>
__device__ void copy(const IndexerFwdParams& p, const CUtensorMap& q_map, const CUtensorMap& k_map,
                     Shared<Tr>& shared) {
  const bool leader = threadIdx.x % 32 == 0;
  constexpr int kRowElements = Tr::kRowBytes / Tr::kElementBytes;
  RingPlace<Tr::kQStages> q_at = {0, 1};  // of what comes next, as `free` counts
  RingPlace<Tr::kKeyStages> k_at = {0, 1};
  for (Walk<Tr> walk(p, shared.share); walk.next();) {
    const int batch = static_cast<int>(walk.batch), query = static_cast<int>(walk.query);
    mbarrier_wait(&shared.q_free[q_at.index], q_at.parity);
    if (leader) {
      mbarrier_arrive_expect(&shared.q_full[q_at.index], Tr::kQBytes);
      for (int block = 0; block < Tr::kBlocks; ++block) {
        for (int i = 0; i < Tr::kWarpgroups; ++i) {
          tma_load(shared.q[q_at.index][block][i], &q_map, &shared.q_full[q_at.index],
                   block * kRowElements, 0, query + i * Tr::kOwnQueries, batch);
        }
      }
    }
    q_at.advance();
    for (int tile = walk.tiles.first; tile < walk.tiles.last; ++tile) {
      mbarrier_wait(&shared.k_free[k_at.index], k_at.parity);
      if (leader) {
        mbarrier_arrive_expect(&shared.k_full[k_at.index], Tr::kKeyBytes);
        const int row = Tr::kPaged ? row_in_pool(p, walk.batch, tile) : tile * kTile;
        const int pool = Tr::kPaged && p.pools == 1 ? 0 : batch;
#pragma unroll
        for (int block = 0; block < Tr::kBlocks; ++block) {
          tma_load(shared.k[k_at.index][block], &k_map, &shared.k_full[k_at.index],
                   block * kRowElements, row, pool);
        }
      }
      k_at.advance();
    }
  }
}

// ---- products ----------------------------------------------------------------------------------

template <typename Tr>
__device__ void math(const IndexerFwdParams& p, Shared<Tr>& shared) {
  constexpr int kOwn = Tr::kOwnQueries;
  const int warp = threadIdx.x / 32 % 4, group = uniform(static_cast<int>(threadIdx.x / 128));
  // A shuffle with itself hides the value from ptxas, which would recompute it at every use.
  const int lane = __shfl_sync(~0u, threadIdx.x % 32, threadIdx.x % 32);
  const int own_row = warp * 16 + lane / 4 + lane % 2 * 8, own_query = lane / 2 % 2;
  const int keys = static_cast<int>(p.keys);
  const uint64_t q =
      uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.q[0][0][group])));
  const uint64_t k = uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.k[0])));
  const bool scaled = uniform(static_cast<int>(p.k_scale != nullptr));
  RingPlace<Tr::kQStages> q_at;  // of what comes next
  RingPlace<Tr::kKeyStages> k_at;
  // Were both of a pair to multiply at once, they would have their products interleaved, and then
  // both be in their sums with nothing on the tensor cores; nothing would ever move them apart.
  constexpr int kHalf = Tr::kWarpgroups / 2;
  const int own_turn = kTurn + group, partners_turn = kTurn + (group ^ kHalf);
  if (group >= kHalf) named_barrier_arrive<256>(partners_turn);

  for (Walk<Tr> walk(p, shared.share); walk.next();) {
    const int64_t query = walk.query + group * kOwn;
    const int64_t token = walk.batch * p.queries + query;
    const int queries = static_cast<int>(min(max(p.queries - query, int64_t{0}), int64_t{kOwn}));
    float w[Tr::kN / 4];
#pragma unroll
    for (int i = 0; i < Tr::kN / 4; ++i) {
      const int column = i / 2 * 8 + i % 2, head = column % Tr::kHeads + lane % 4 * 2;
      const bool there = column / Tr::kHeads < queries && head < p.heads;
      w[i] = there ? __ldg(p.weights + (token + column / Tr::kHeads) * p.heads + head) : 0.f;
      if (Tr::kSums) w[i] *= 0.5f;
    }
    int start[kOwn / 2];
    uint32_t length[kOwn / 2];  // a key is seen if key - start < length
    int limit[kOwn / 2];        // keys below it have an output
#pragma unroll
    for (int h = 0; h < kOwn / 2; ++h) {
      const bool there = 2 * h + own_query < queries;
      start[h] = there ? __ldg(p.starts + token + 2 * h + own_query) : 0;
      length[h] = there ? max(__ldg(p.ends + token + 2 * h + own_query) - start[h], 0) : 0;
      limit[h] = there ? keys : 0;
    }
    int key = walk.tiles.first * kTile + own_row;
    float* out = p.out + (token + own_query) * p.keys + key;
    const int64_t of_batch = !Tr::kPaged    ? walk.batch * p.keys
                             : p.pools == 1 ? 0
                                            : walk.batch * p.pages * p.page_size;
    const auto scale_from =
        uniform(reinterpret_cast<uint64_t>(p.k_scale + (scaled ? of_batch : 0)));

    mbarrier_wait(&shared.q_full[q_at.index], q_at.parity);
    const uint64_t own_q = moved(q, q_at.index * Tr::kQBytes);
    int left = uniform(walk.tiles.last - walk.tiles.first);
    for (; queries == 0 && left > 0; --left) {  // the item has queries for other warpgroups only
      mbarrier_wait(&shared.k_full[k_at.index], k_at.parity);
      named_barrier_sync<256>(own_turn);
      named_barrier_arrive<256>(partners_turn);
      if (lane == 0) mbarrier_arrive(&shared.k_free[k_at.index]);
      k_at.advance();
    }
    for (; left > 0; --left) {
      float sum[kOwn / 2];
      float scale = 1.f;
      mbarrier_wait(&shared.k_full[k_at.index], k_at.parity);
      named_barrier_sync<256>(own_turn);
      float x[Tr::kN / 2];
      wgmma_fence();
      multiply<Tr>(x, moved(k, k_at.index * Tr::kKeyBytes), own_q);
      int place = key;  // among the scales
      bool there = key < limit[0];
      if constexpr (Tr::kPaged) {
        place = row_in_pool(p, walk.batch, walk.tiles.last - left);
        there = there && place < p.pages * p.page_size;
        place += own_row;
      }
      if (scaled && there) {
        scale = __ldg(reinterpret_cast<const float*>(scale_from) + place);
      }
      wgmma_wait<(Tr::kEarly > 0)>();
      named_barrier_arrive<256>(partners_turn);
      wgmma_wait<0>();
      wgmma_pin(x);
      if (lane == 0) mbarrier_arrive(&shared.k_free[k_at.index]);
      if (p.relu) {
        sum_heads<Tr, true>(x, w, lane, sum);
      } else {
        sum_heads<Tr, false>(x, w, lane, sum);
      }
      k_at.advance();
#pragma unroll
      for (int h = 0; h < kOwn / 2; ++h) {
        const bool seen =
            static_cast<uint32_t>(key - start[h]) < length[h] && (!Tr::kPaged || there);
        if (key < limit[h]) __stcs(out + 2 * h * p.keys, seen ? sum[h] * scale : -INFINITY);
      }
      key += kTile;
      out += kTile;
    }
    if (lane == 0) mbarrier_arrive(&shared.q_free[q_at.index]);
    q_at.advance();
  }
  if (group < kHalf) named_barrier_sync<256>(own_turn);  // the turn after the last
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    fwd_kernel(const IndexerFwdParams p, const __grid_constant__ CUtensorMap q_map,
               const __grid_constant__ CUtensorMap k_map) {
  auto& shared = dynamic_shared<Shared<Tr>>();
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    for (int i = 0; i < Tr::kQStages; ++i) {
      mbarrier_init(&shared.q_full[i], 1);
      mbarrier_init(&shared.q_free[i], Tr::kMathThreads / 32);
    }
    for (int i = 0; i < Tr::kKeyStages; ++i) {
      mbarrier_init(&shared.k_full[i], 1);
      mbarrier_init(&shared.k_free[i], Tr::kMathThreads / 32);
    }
    mbarrier_init_fence();
  }
  find_share<Tr>(p, shared);
  if (threadIdx.x < Tr::kMathThreads) {
    raise_registers<Tr::kMathRegisters>();
    math<Tr>(p, shared);
  } else {
    lower_registers<Tr::kOtherRegisters>();
    const int warp = threadIdx.x / 32 - Tr::kMathThreads / 32;
    if (warp == 0) {
      copy<Tr>(p, q_map, k_map, shared);
    } else if (p.whole_rows) {
      fill<Tr>(p, warp - 1);
    }
  }
}

}  // namespace jax_dsa::indexer
