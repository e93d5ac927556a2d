// Block maxima of the indexer for heads that select for themselves. For every row r, which is a
// query and a head, and every block of keys:
//
//   logit = max over the block's visible keys s of k_scale[s] * relu(q[r] . k[s])
//   key   = the first s that has this logit
//
// ReLU and scale are optional. NaN counts as the largest logit. Blocks count from the start of the
// query. The logits of single keys never leave the registers.
//
// Operand layout. Rows are the M dimension of the MMA and keys its N dimension. A warpgroup
// multiplies 64 rows with a tile of 128 keys. A thread holds 32 keys of two rows each, so a maximum
// is 31 instructions per row and two shuffles. Another pass over the accumulators finds the first
// key that has it.
//
// Key tiles begin at the first key of a block: a tile is a part of one block, or holds two blocks
// of 64 keys (kBlocks). If a block has several tiles, their maxima are combined in registers.
//
// Warpgroups. Four consumer warpgroups with 64 rows each share the key tiles. They form two pairs,
// in which a ping-pong barrier lets one warpgroup multiply while the other searches. The last
// warpgroup has one producer warp, which copies queries and keys with TMA and scales with cp.async.
//
// Work tiles. A work tile is the 256 rows of all consumer warpgroups; see block_plan.cuh.
//
// Shared memory for bf16 and 128 channels: Q of two work tiles (64 KiB each) and 3 key tiles (32
// KiB each).
#pragma once

#include <algorithm>

#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "indexer/block_plan.cuh"
#include "indexer/fwd_plan.cuh"

namespace jax_dsa::indexer {

template <IndexerDType kDType_, int kChannels, int kBlocks_>
struct BlockTraits {
  static constexpr IndexerDType kDType = kDType_;
  static constexpr int kBlocks = kBlocks_;  // blocks per key tile: 1 or 2
  static constexpr int kWarpgroups = 4;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kKeys = 128;  // keys per tile
  static constexpr int kElementBytes = kDType == IndexerDType::kBF16 ? 2 : 1;
  static constexpr int kChannelBytes = kChannels * kElementBytes;
  static constexpr int kRowBytes = std::min(kChannelBytes, 128);
  static constexpr int kRowElements = kRowBytes / kElementBytes;
  static constexpr int kChannelBlocks = kChannelBytes / kRowBytes;
  static constexpr int kQBytes = kRows * kChannelBytes;
  static constexpr int kKeyBytes = kKeys * kChannelBytes;
  static constexpr int kQStages = 2;
  static constexpr int kKeyStages = std::min(96 * 1024 / kKeyBytes, 8);
  static constexpr int kConsumerThreads = kWarpgroups * 128, kThreads = kConsumerThreads + 128;
  static constexpr int kConsumerRegisters = 112, kProducerRegisters = 32;
  static_assert(registers_fit(1, kWarpgroups, kConsumerRegisters, kProducerRegisters));
};

// Barrier 0 is __syncthreads. kBlockPingPong + w is the ping-pong barrier of warpgroup w.
enum BlockNamedBarrier { kBlockPingPong = 1 };

// Arrivals of the producer warp on the `full` barrier of a key tile: one per lane for its 4-byte
// copies, and two more of the first lane, before its TMA loads and after its stores.
inline constexpr int kKeyArrivals = 34;

template <typename Tr>
struct alignas(1024) BlockShared {
  uint8_t q[Tr::kQStages][Tr::kChannelBlocks][Tr::kWarpgroups][64 * Tr::kRowBytes];
  uint8_t k[Tr::kKeyStages][Tr::kChannelBlocks][Tr::kKeys * Tr::kRowBytes];
  float k_scale[Tr::kKeyStages][Tr::kKeys];
  int is_mapped[Tr::kKeyStages][Tr::kKeys / kTile];  // written for paged keys only
  uint64_t q_full[Tr::kQStages], q_free[Tr::kQStages];
  uint64_t k_full[Tr::kKeyStages], k_free[Tr::kKeyStages];
  int64_t warp_sums[Tr::kThreads / 32];
  BlockWork work;
};

// ---- copies ------------------------------------------------------------------------------------

template <typename Tr>
__device__ void produce(const BlockMaxParams& params, const CUtensorMap& q_map,
                        const CUtensorMap& k_map, BlockShared<Tr>& shared) {
  const IndexerFwdParams& p = params.in;
  const int lane = threadIdx.x % 32;
  const bool paged = p.page_table != nullptr;
  const int64_t pool_rows = paged ? int64_t{p.pages} * p.page_size : p.keys;
  RingPlace<Tr::kQStages> q_at = {0, 1};  // the next stages, with the parities of `free`
  RingPlace<Tr::kKeyStages> k_at = {0, 1};
  for (BlockWalk<Tr> walk(params, shared.work); walk.next();) {
    const int batch = static_cast<int>(walk.batch), pool = paged && p.pools == 1 ? 0 : batch;
    mbarrier_wait(&shared.q_free[q_at.index], q_at.parity);
    if (lane == 0) {
      mbarrier_arrive_expect(&shared.q_full[q_at.index], Tr::kQBytes);
      for (int block = 0; block < Tr::kChannelBlocks; ++block) {
        for (int i = 0; i < Tr::kWarpgroups; ++i) {
          tma_load(shared.q[q_at.index][block][i], &q_map, &shared.q_full[q_at.index],
                   block * Tr::kRowElements, static_cast<int>(walk.row) + i * 64, batch);
        }
      }
    }
    q_at.advance();
    for (int unit = walk.first; unit < walk.last; ++unit) {
      const Span range = unit_range(params, walk.span, unit);
      for (int tile = range.start; tile < range.end; tile += Tr::kKeys) {
        mbarrier_wait(&shared.k_free[k_at.index], k_at.parity);
        uint64_t* const full = &shared.k_full[k_at.index];
        if (lane == 0) mbarrier_arrive_expect(full, Tr::kKeyBytes);
        for (int part = 0; part < Tr::kKeys / kTile; ++part) {
          const int key = walk.span.start + tile + part * kTile;
          int row = key;
          if (paged) {
            const int page = key < p.keys ? __ldg(page_entry(p, walk.batch, key / kTile)) : INT_MAX;
            row = row_in_pool(p, key / kTile, page);
            if (lane == 0) shared.is_mapped[k_at.index][part] = is_mapped_page(p, page);
          }
          if (lane == 0) {
            for (int block = 0; block < Tr::kChannelBlocks; ++block) {
              tma_load(shared.k[k_at.index][block] + part * kTile * Tr::kRowBytes, &k_map, full,
                       block * Tr::kRowElements, row, pool);
            }
          }
          if (p.k_scale) {
            for (int i = lane; i < kTile; i += 32) {
              const bool in_bounds = row + i < pool_rows;
              cp_async_4(smem_address(&shared.k_scale[k_at.index][part * kTile + i]),
                         p.k_scale + (in_bounds ? pool * pool_rows + row + i : 0), in_bounds);
            }
          }
        }
        if (lane == 0) mbarrier_arrive(full);  // `is_mapped` is written.
        cp_async_arrive(full);
        k_at.advance();
      }
    }
  }
}

// ---- products ----------------------------------------------------------------------------------

// Starts the product of 64 rows with a key tile.
template <typename Tr>
__device__ __forceinline__ void multiply_rows(float (&d)[Tr::kKeys / 2], uint64_t q, uint64_t k) {
#pragma unroll
  for (int i = 0; i < Tr::kChannelBytes / 32; ++i) {
    const int block = i * 32 / Tr::kRowBytes, step = i * 32 % Tr::kRowBytes;
    const uint64_t a = moved(q, block * Tr::kRows * Tr::kRowBytes + step);
    const uint64_t b = moved(k, block * Tr::kKeys * Tr::kRowBytes + step);
    if constexpr (Tr::kDType == IndexerDType::kBF16) {
      wgmma_bf16<kKMajor, kKMajor>(d, a, b, i > 0);
    } else {
      wgmma_e4m3(d, a, b, i > 0);
    }
  }
  wgmma_commit();
}

// The largest logits of two rows, in all four lanes that share the rows, and their first columns.
struct RowMaxima {
  float logit[2];
  int column[2];
};

// Finds the maxima over columns [8 * kFirst, 8 * (kFirst + kCount)). A thread holds the columns
// own_column + {0, 1} of each eight.
//
// The sign of x - m tells whether x equals the maximum m, because x cannot be larger. The search
// collects these signs in one word per row. A subtraction and a funnel shift per column cost the
// integer pipe, which also computes the maxima, half as much as a comparison and a select.
template <int kFirst, int kCount>
__device__ __forceinline__ RowMaxima find_maxima(float (&x)[64], int own_column) {
  RowMaxima found;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even = x[4 * kFirst + 2 * r], odd = x[4 * kFirst + 2 * r + 1];
#pragma unroll
    for (int g = kFirst + 1; g < kFirst + kCount; ++g) {
      even = max_nan(even, x[4 * g + 2 * r]);
      odd = max_nan(odd, x[4 * g + 2 * r + 1]);
    }
    float m = max_nan(even, odd);
    m = max_nan(m, __shfl_xor_sync(~0u, m, 1));
    found.logit[r] = max_nan(m, __shfl_xor_sync(~0u, m, 2));
  }
  float largest[2] = {found.logit[0], found.logit[1]};
  if (__any_sync(~0u, !(largest[0] < INFINITY) || !(largest[1] < INFINITY))) {
    // Infinities and NaN have no difference. Search for 0 among 0 and -1 in their place.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m = found.logit[r];
      if (m < INFINITY) continue;
      largest[r] = 0.f;
#pragma unroll
      for (int g = kFirst; g < kFirst + kCount; ++g) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& y = x[4 * g + 2 * r + e];
          y = !(y < INFINITY) & (isnan(y) == isnan(m)) ? 0.f : -1.f;
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t smaller = 0;  // one bit per column of the thread, the highest for the first one
#pragma unroll
    for (int g = kFirst; g < kFirst + kCount; ++g) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float difference = x[4 * g + 2 * r + e] - largest[r];
        smaller = __funnelshift_l(__float_as_uint(difference), smaller, 1);
      }
    }
    const int first =
        __clz(~(smaller << (32 - 2 * kCount)));  // 2 * kCount or more if there is none
    int column = 8 * kFirst + first / 2 * 8 + first % 2 + own_column;
    column = min(column, __shfl_xor_sync(~0u, column, 1));
    found.column[r] = min(column, __shfl_xor_sync(~0u, column, 2));
  }
  return found;
}

// Multiplies each column by the scale of its key.
__device__ __forceinline__ void apply_scales(float (&x)[64], const float* scales, int own_column) {
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * g + own_column);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      x[4 * g + 2 * r] *= scale.x;
      x[4 * g + 2 * r + 1] *= scale.y;
    }
  }
}

// Replaces columns from `limit[r]` on, and those of unmapped pages, by -inf.
__device__ __forceinline__ void hide(float (&x)[64], const int (&limit)[2], const bool (&mapped)[2],
                                     int own_column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int own_limit = limit[r] - own_column;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int column = i / 2 * 8 + i % 2;
      const bool seen = column < own_limit && mapped[column / kTile];
      if (!seen) x[i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
    }
  }
}

template <typename Tr>
__device__ void consume(const BlockMaxParams& params, BlockShared<Tr>& shared) {
  const IndexerFwdParams& p = params.in;
  const int warpgroup = uniform(static_cast<int>(threadIdx.x / 128));
  // The shuffle makes the value opaque to ptxas, which would otherwise recompute it at every use.
  const int lane = __shfl_sync(~0u, threadIdx.x % 32, threadIdx.x % 32);
  const int own_row = threadIdx.x / 32 * 16 + lane / 4, own_column = lane % 4 * 2;
  const uint64_t q =
      uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.q[0][0][warpgroup])));
  const uint64_t k = uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.k[0])));
  const int64_t rows = p.queries * p.heads;
  RingPlace<Tr::kQStages> q_at;
  RingPlace<Tr::kKeyStages> k_at;
  // See fwd.cuh for the ping-pong barriers.
  constexpr int kPairs = Tr::kWarpgroups / 2;
  const int own_barrier = kBlockPingPong + warpgroup;
  const int partner_barrier = kBlockPingPong + (warpgroup ^ kPairs);
  if (warpgroup >= kPairs) named_barrier_arrive<256>(partner_barrier);

  for (BlockWalk<Tr> walk(params, shared.work); walk.next();) {
    int end[2];  // ends of the thread's rows, counted from the start of the span
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = walk.row + own_row + 8 * r;
      end[r] = 0;
      if (row < rows) {
        const Span seen = seen_keys(p, walk.batch, row / p.heads);
        if (seen.start == walk.span.start) end[r] = max(seen.end - seen.start, 0);
      }
    }
    // The first two of the four lanes that share two rows store the scores of one row each.
    const int64_t list = walk.batch * rows + walk.row + own_row + lane % 2 * 8;
    BlockScore* const scores = params.scores + list * params.blocks;
    const int stored_end = lane % 4 > 1 ? 0 : lane % 2 ? end[1] : end[0];
    const bool idle = walk.row + warpgroup * 64 >= rows;
    mbarrier_wait(&shared.q_full[q_at.index], q_at.parity);
    const uint64_t own_q = moved(q, q_at.index * Tr::kQBytes);

    for (int unit = walk.first; unit < walk.last; ++unit) {
      const Span range = unit_range(params, walk.span, unit);
      float best = -INFINITY;  // of the unit's tiles so far, for the row that this lane stores
      int best_key = -1;
      for (int tile = range.start; tile < range.end; tile += Tr::kKeys) {
        mbarrier_wait(&shared.k_full[k_at.index], k_at.parity);
        named_barrier_sync<256>(own_barrier);
        if (idle) {  // Only keep up with the barriers.
          named_barrier_arrive<256>(partner_barrier);
          if (lane == 0) mbarrier_arrive(&shared.k_free[k_at.index]);
          k_at.advance();
          continue;
        }
        float x[Tr::kKeys / 2];
        wgmma_fence();
        multiply_rows<Tr>(x, own_q, moved(k, k_at.index * Tr::kKeyBytes));
        wgmma_wait<0>();
        named_barrier_arrive<256>(partner_barrier);
        wgmma_pin(x);
        const int limit[2] = {min(end[0], range.end) - tile, min(end[1], range.end) - tile};
        bool mapped[2] = {true, true};
        if (p.page_table) {
          mapped[0] = shared.is_mapped[k_at.index][0], mapped[1] = shared.is_mapped[k_at.index][1];
        }
        if (p.relu) {
#pragma unroll
          for (float& y : x) y = max_nan(y, 0.f);
        }
        if (p.k_scale) apply_scales(x, shared.k_scale[k_at.index], own_column);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.k_free[k_at.index]);
        k_at.advance();
        const bool whole = min(limit[0], limit[1]) >= Tr::kKeys && mapped[0] && mapped[1];
        if (!__all_sync(~0u, whole)) hide(x, limit, mapped, own_column);

        const auto own = [&](const RowMaxima& found) {
          const bool second = lane % 2;
          return BlockScore{second ? found.logit[1] : found.logit[0],
                            walk.span.start + tile + (second ? found.column[1] : found.column[0])};
        };
        if constexpr (Tr::kBlocks == 1) {
          const BlockScore found = own(find_maxima<0, 16>(x, own_column));
          if (!isnan(best) && !(found.logit <= best)) best = found.logit, best_key = found.key;
        } else {
          const BlockScore first = own(find_maxima<0, 8>(x, own_column));
          if (tile < stored_end) scores[2 * unit] = first;
          const BlockScore second = own(find_maxima<8, 8>(x, own_column));
          if (tile + kTile < stored_end) scores[2 * unit + 1] = second;
        }
      }
      if constexpr (Tr::kBlocks == 1) {
        if (range.start < stored_end) scores[unit] = {best, best_key};
      }
    }
    if (lane == 0) mbarrier_arrive(&shared.q_free[q_at.index]);
    q_at.advance();
  }
  // Take the last arrival of the partner, so that no barrier is left half full.
  if (warpgroup < kPairs) named_barrier_sync<256>(own_barrier);
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    block_max_kernel(const __grid_constant__ BlockMaxParams p,
                     const __grid_constant__ CUtensorMap q_map,
                     const __grid_constant__ CUtensorMap k_map) {
  auto& shared = dynamic_shared<BlockShared<Tr>>();
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    for (int i = 0; i < Tr::kQStages; ++i) {
      mbarrier_init(&shared.q_full[i], 1);
      mbarrier_init(&shared.q_free[i], Tr::kConsumerThreads / 32);
    }
    for (int i = 0; i < Tr::kKeyStages; ++i) {
      mbarrier_init(&shared.k_full[i], kKeyArrivals);
      mbarrier_init(&shared.k_free[i], Tr::kConsumerThreads / 32);
    }
    mbarrier_init_fence();
  }
  find_block_work<Tr>(p, shared);
  if (threadIdx.x < Tr::kConsumerThreads) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr>(p, shared);
  } else {
    lower_registers<Tr::kProducerRegisters>();
    if (threadIdx.x / 32 == Tr::kConsumerThreads / 32) produce<Tr>(p, q_map, k_map, shared);
  }
}

}  // namespace jax_dsa::indexer
