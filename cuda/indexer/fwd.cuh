// Lightning indexer, forward pass. For every query t and key s:
//
//   out[t,s] = k_scale[s] * sum_j w[t,j] * relu(q[t,j] . k[s])    if starts[t] <= s < ends[t]
//              -inf                                               otherwise
//
// Operand layout. Keys are the M dimension of the MMA and (query, head) pairs its N dimension. A
// warpgroup multiplies a tile of 64 keys with kN columns: 128 columns are 2 queries of 64 heads,
// 256 columns are 8 queries of 32 heads or 16 of 16. Missing heads are padded with weight 0. The
// weight of a column is the same for all keys, so the weights stay in registers, kN / 4 per thread.
// After the MMA every accumulator takes a ReLU and an FMA. The sum over heads stays within a thread
// except for its last step, which goes over four lanes.
//
// Warpgroups. Four consumer warpgroups with kN = 128 or two with kN = 256, each with its own
// queries, all with the same key tiles. They form pairs, in which a ping-pong barrier lets one
// warpgroup multiply while the other computes its sums. The last warpgroup has one producer warp,
// which copies queries and keys with TMA, and three warps that store -inf where no product is
// needed.
//
// Work tiles. A work tile is the `kQueries` queries of all consumer warpgroups; see fwd_plan.cuh
// for how the CTAs divide the key tiles.
//
// Shared memory for 128 channels: Q of one or two work tiles (64 KiB each in FP8, 128 KiB in bf16),
// and a ring of 6 or 8 key tiles. Rows of up to 128 bytes are swizzled; wider rows are stored in
// blocks of 128 bytes.
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

// kHeads is the padded number of heads: 16, 32 or 64. kPaged says whether keys lie in pages.
template <IndexerDType kDType_, int kChannels, int kHeads_, bool kPaged_>
struct Traits {
  static constexpr bool kPaged = kPaged_;
  // The number of consumer warpgroups. Four of them leave too few registers for more than 2 queries
  // each.
  static constexpr int kWarpgroups = kHeads_ == 64 ? 4 : 2;
  static constexpr int kN = 512 / kWarpgroups;  // columns per warpgroup
  static constexpr int kColumns = kN * kWarpgroups;
  // How many MMA steps before the end of its product a warpgroup lets its partner start. With two
  // pairs of warpgroups this is not needed: one pair fills the gap in which the other hands over.
  static constexpr int kEarlySteps = kWarpgroups == 2 ? 1 : 0;
  // Whether relu(x) is computed as (x + |x|) / 2, with the factor 1/2 in the weights. Additions run
  // at twice the rate of maxima. The formula turns -inf into NaN, but a product of e4m3 values is
  // never infinite.
  static constexpr bool kReluBySum = kDType_ == IndexerDType::kE4M3;
  static constexpr IndexerDType kDType = kDType_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kElementBytes = kDType == IndexerDType::kBF16 ? 2 : 1;
  static constexpr int kChannelBytes = kChannels * kElementBytes;
  static constexpr int kRowBytes = kChannelBytes < 128 ? kChannelBytes : 128;
  static constexpr int kBlocks = kChannelBytes / kRowBytes;
  static constexpr int kOwnQueries = kN / kHeads;  // queries per warpgroup
  static constexpr int kQueries = kOwnQueries * kWarpgroups;
  static constexpr int kQBytes = kColumns * kChannelBytes;
  static constexpr int kKeyBytes = kTile * kChannelBytes;
  static constexpr int kQStages = kQBytes > 64 * 1024 ? 1 : 2;
  static constexpr int kKeyStages = kKeyBytes > 8 * 1024 ? 6 : 8;
  static constexpr int kConsumerThreads = kWarpgroups * 128, kThreads = kConsumerThreads + 128;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 224 : 112;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 56 : 32;
  static_assert(registers_fit(1, kWarpgroups, kConsumerRegisters, kProducerRegisters));
  static constexpr int kFillWarps = 3;
  static_assert(kQueries <= 32 && kOwnQueries >= 2);
};

// Barrier 0 is __syncthreads. kPingPong + w is the ping-pong barrier of warpgroup w.
enum NamedBarrier { kPingPong = 1 };

template <typename Tr>
struct alignas(1024) Shared {
  uint8_t q[Tr::kQStages][Tr::kBlocks][Tr::kWarpgroups][Tr::kN * Tr::kRowBytes];
  uint8_t k[Tr::kKeyStages][Tr::kBlocks][kTile * Tr::kRowBytes];
  uint64_t q_full[Tr::kQStages], q_free[Tr::kQStages];
  uint64_t k_full[Tr::kKeyStages], k_free[Tr::kKeyStages];
  int64_t warp_sums[Tr::kThreads / 32];
  WorkRange work_range;
};

// ---- copies ------------------------------------------------------------------------------------

template <typename Tr>
__device__ void produce(const IndexerFwdParams& p, const CUtensorMap& q_map,
                        const CUtensorMap& k_map, Shared<Tr>& shared) {
  const bool leader = threadIdx.x % 32 == 0;
  constexpr int kRowElements = Tr::kRowBytes / Tr::kElementBytes;
  RingPlace<Tr::kQStages> q_at = {0, 1};  // the next stages, with the parities of `free`
  RingPlace<Tr::kKeyStages> k_at = {0, 1};
  for (Walk<Tr> walk(p, shared.work_range); walk.next();) {
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
__device__ void consume(const IndexerFwdParams& p, Shared<Tr>& shared) {
  constexpr int kOwnQueries = Tr::kOwnQueries;
  const int warp = threadIdx.x / 32 % 4, warpgroup = uniform(static_cast<int>(threadIdx.x / 128));
  // The shuffle makes the value opaque to ptxas, which would otherwise recompute it at every use.
  const int lane = __shfl_sync(~0u, threadIdx.x % 32, threadIdx.x % 32);
  const int own_row = warp * 16 + lane / 4 + lane % 2 * 8, own_query = lane / 2 % 2;
  const int keys = static_cast<int>(p.keys);
  const uint64_t q =
      uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.q[0][0][warpgroup])));
  const uint64_t k = uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.k[0])));
  const bool scaled = uniform(static_cast<int>(p.k_scale != nullptr));
  RingPlace<Tr::kQStages> q_at;
  RingPlace<Tr::kKeyStages> k_at;
  // The ping-pong barriers keep the two warpgroups of a pair apart. If both multiplied at once,
  // their MMAs would interleave, and then both would compute sums while the tensor cores are idle.
  // They would stay in step for the rest of the kernel.
  constexpr int kPairs = Tr::kWarpgroups / 2;
  const int own_barrier = kPingPong + warpgroup, partner_barrier = kPingPong + (warpgroup ^ kPairs);
  if (warpgroup >= kPairs) named_barrier_arrive<256>(partner_barrier);

  for (Walk<Tr> walk(p, shared.work_range); walk.next();) {
    const int64_t query = walk.query + warpgroup * kOwnQueries;
    const int64_t token = walk.batch * p.queries + query;
    const int queries =
        static_cast<int>(min(max(p.queries - query, int64_t{0}), int64_t{kOwnQueries}));
    float w[Tr::kN / 4];
#pragma unroll
    for (int i = 0; i < Tr::kN / 4; ++i) {
      const int column = i / 2 * 8 + i % 2, head = column % Tr::kHeads + lane % 4 * 2;
      const bool in_bounds = column / Tr::kHeads < queries && head < p.heads;
      w[i] = in_bounds ? __ldg(p.weights + (token + column / Tr::kHeads) * p.heads + head) : 0.f;
      if (Tr::kReluBySum) w[i] *= 0.5f;
    }
    int start[kOwnQueries / 2];
    uint32_t length[kOwnQueries / 2];  // A key is seen if key - start < length, unsigned.
    int limit[kOwnQueries / 2];        // Keys below the limit have an output.
#pragma unroll
    for (int h = 0; h < kOwnQueries / 2; ++h) {
      const bool in_bounds = 2 * h + own_query < queries;
      start[h] = in_bounds ? __ldg(p.starts + token + 2 * h + own_query) : 0;
      length[h] = in_bounds ? max(__ldg(p.ends + token + 2 * h + own_query) - start[h], 0) : 0;
      limit[h] = in_bounds ? keys : 0;
    }
    int key = walk.tiles.first * kTile + own_row;
    float* out = p.out + (token + own_query) * p.keys + key;
    const int64_t batch_offset = !Tr::kPaged    ? walk.batch * p.keys
                                 : p.pools == 1 ? 0
                                                : walk.batch * p.pages * p.page_size;
    const auto scale_from =
        uniform(reinterpret_cast<uint64_t>(p.k_scale + (scaled ? batch_offset : 0)));

    mbarrier_wait(&shared.q_full[q_at.index], q_at.parity);
    const uint64_t own_q = moved(q, q_at.index * Tr::kQBytes);
    int left = uniform(walk.tiles.last - walk.tiles.first);
    // If the work tile has queries only for other warpgroups, just keep up with the barriers.
    for (; queries == 0 && left > 0; --left) {
      mbarrier_wait(&shared.k_full[k_at.index], k_at.parity);
      named_barrier_sync<256>(own_barrier);
      named_barrier_arrive<256>(partner_barrier);
      if (lane == 0) mbarrier_arrive(&shared.k_free[k_at.index]);
      k_at.advance();
    }
    for (; left > 0; --left) {
      float sum[kOwnQueries / 2];
      float scale = 1.f;
      mbarrier_wait(&shared.k_full[k_at.index], k_at.parity);
      named_barrier_sync<256>(own_barrier);
      float x[Tr::kN / 2];
      wgmma_fence();
      multiply<Tr>(x, moved(k, k_at.index * Tr::kKeyBytes), own_q);
      int scale_index = key;  // index of the key's scale
      bool in_bounds = key < limit[0];
      if constexpr (Tr::kPaged) {
        scale_index = row_in_pool(p, walk.batch, walk.tiles.last - left);
        in_bounds = in_bounds && scale_index < p.pages * p.page_size;
        scale_index += own_row;
      }
      if (scaled && in_bounds) {
        scale = __ldg(reinterpret_cast<const float*>(scale_from) + scale_index);
      }
      wgmma_wait<(Tr::kEarlySteps > 0)>();
      named_barrier_arrive<256>(partner_barrier);
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
      for (int h = 0; h < kOwnQueries / 2; ++h) {
        const bool seen =
            static_cast<uint32_t>(key - start[h]) < length[h] && (!Tr::kPaged || in_bounds);
        if (key < limit[h]) __stcs(out + 2 * h * p.keys, seen ? sum[h] * scale : -INFINITY);
      }
      key += kTile;
      out += kTile;
    }
    if (lane == 0) mbarrier_arrive(&shared.q_free[q_at.index]);
    q_at.advance();
  }
  // Take the last arrival of the partner, so that no barrier is left half full.
  if (warpgroup < kPairs) named_barrier_sync<256>(own_barrier);
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
      mbarrier_init(&shared.q_free[i], Tr::kConsumerThreads / 32);
    }
    for (int i = 0; i < Tr::kKeyStages; ++i) {
      mbarrier_init(&shared.k_full[i], 1);
      mbarrier_init(&shared.k_free[i], Tr::kConsumerThreads / 32);
    }
    mbarrier_init_fence();
  }
  find_work_range<Tr>(p, shared);
  if (threadIdx.x < Tr::kConsumerThreads) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr>(p, shared);
  } else {
    lower_registers<Tr::kProducerRegisters>();
    const int warp = threadIdx.x / 32 - Tr::kConsumerThreads / 32;
    if (warp == 0) {
      produce<Tr>(p, q_map, k_map, shared);
    } else if (p.whole_rows) {
      fill<Tr>(p, warp - 1);
    }
  }
}

}  // namespace jax_dsa::indexer
