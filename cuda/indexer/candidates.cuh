// Lightning indexer inside candidate blocks: the logits of those keys only that a query may select.
//
// candidate_lists.cuh says how the candidate keys of a query are numbered. Keys that the caller
// names are candidates in blocks of one key, in any order.
//
// Operand layout. Keys are the M dimension of the MMA and the heads of one query its N dimension,
// as in decode.cuh, whose sums over heads and channels have the same order: a logit has the bits
// that the kernels for all keys compute. Each of the four consumer warpgroups has tiles and a ring
// of key tiles of its own, which one producer warp fills with cp.async, because the rows of a tile
// may lie anywhere.
//
// Work units. A unit is a segment of one query's row. Units are numbered segment by segment, so
// that CTAs that run at the same time read neighbouring keys, which the L2 cache then holds.
//
// Shared memory for 128 channels in bf16: Q of two units, 32 KiB, and four rings of two key tiles,
// 128 KiB. In FP8 the same rings hold four tiles.
#pragma once

#include <type_traits>

#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "indexer/candidates.h"
#include "indexer/decode.cuh"

namespace jax_dsa::indexer {

// ---- work units --------------------------------------------------------------------------------

// Iterates over the units of this CTA.
struct Units {
  const CandidateRows& x;
  const int64_t total;
  const int segment_tiles;  // key tiles of a segment, a multiple of the number of warpgroups
  int64_t unit, row;
  int count;        // candidate keys of the row
  int first, last;  // key tiles of the segment

  __device__ Units(const CandidateRows& x, int segment_tiles)
      : x(x),
        total(x.rows * ceil_div(x.size, int64_t{segment_tiles} * kTile)),
        segment_tiles(segment_tiles),
        unit(blockIdx.x) {}

  __device__ bool next() {
    for (; unit < total; unit += gridDim.x) {
      const auto segment = static_cast<int>(unit / x.rows);
      row = unit - segment * x.rows;
      count = x.counts ? __ldg(x.counts + row) : static_cast<int>(x.size);
      first = segment * segment_tiles;
      last = min(first + segment_tiles, ceil_div(count, kTile));
      if (first >= last) continue;
      unit += gridDim.x;
      return true;
    }
    return false;
  }
};

template <typename Tr>
struct alignas(1024) CandidateShared {
  uint8_t q[Tr::kQStages][Tr::kBlocks][Tr::kColumns * Tr::kRowBytes];
  uint8_t k[Tr::kWarpgroups][Tr::kKeyStages][Tr::kBlocks][kTile * Tr::kRowBytes];
  float k_scale[Tr::kWarpgroups][Tr::kKeyStages][kTile];
  uint32_t is_mapped[Tr::kWarpgroups][Tr::kKeyStages][2];  // one bit per row of the tile
  uint64_t q_full[Tr::kQStages], q_free[Tr::kQStages];
  uint64_t k_full[Tr::kWarpgroups][Tr::kKeyStages], k_free[Tr::kWarpgroups][Tr::kKeyStages];
};

// ---- copies ------------------------------------------------------------------------------------

// The candidate key at a position of the row. The position moves on by kStep at a time without a
// division.
struct Position {
  int at, block, offset;  // at = block * block_size + offset

  __device__ Position(int at, int block_size)
      : at(at), block(at / block_size), offset(at - block * block_size) {}
  __device__ void advance(const Position& step, int block_size) {
    at += step.at, block += step.block, offset += step.offset;
    if (offset >= block_size) offset -= block_size, ++block;
  }
};

// The loop of the producer warp that gathers the key tiles of consumer `warpgroup`.
template <typename Tr>
__device__ void gather(const IndexerFwdParams& p, const CandidateRows& x, int segment_tiles,
                       const CUtensorMap& q_map, CandidateShared<Tr>& shared, int warpgroup) {
  constexpr int kChunks = Tr::kChannelBytes / 16;         // 16-byte chunks of a key
  constexpr int kRows = 32 / kChunks;                     // keys that a warp copies at once
  constexpr int kOffsets = 1024 / Tr::kRowBytes / kRows;  // the swizzle repeats after these
  constexpr int kRowElements = Tr::kRowBytes / Tr::kElementBytes;  // of a row in shared memory
  const int lane = threadIdx.x % 32, chunk = lane % kChunks, sub = lane / kChunks;
  const uint64_t policy = l2_policy_evict_last();
  uint32_t offset[kOffsets];
#pragma unroll
  for (int i = 0; i < kOffsets; ++i) {
    const uint32_t in_block = (i * kRows + sub) * Tr::kRowBytes + chunk * 16 % Tr::kRowBytes;
    offset[i] = chunk * 16 / Tr::kRowBytes * (kTile * Tr::kRowBytes) +
                (in_block ^ (in_block >> 7 & (Tr::kRowBytes / 16 - 1)) << 4);
  }
  const bool paged = p.page_table != nullptr;
  const int64_t pool_rows = paged ? int64_t{p.pages} * p.page_size : p.keys;
  const auto keys = static_cast<uint32_t>(p.keys);
  const Position step(Tr::kWarpgroups * kTile, x.block_size);
  RingPlace<Tr::kQStages> q_at = {0, 1};  // the next stages, with the parities of `free`
  RingPlace<Tr::kKeyStages> k_at = {0, 1};
  for (Units units(x, segment_tiles); units.next();) {
    const int64_t token = x.first_token + units.row, batch = token / p.queries;
    if (warpgroup == 0) {
      mbarrier_wait(&shared.q_free[q_at.index], q_at.parity);
      if (lane == 0) {
        mbarrier_arrive_expect(&shared.q_full[q_at.index], Tr::kQBytes);
#pragma unroll
        for (int block = 0; block < Tr::kBlocks; ++block) {
          tma_load(shared.q[q_at.index][block], &q_map, &shared.q_full[q_at.index],
                   block * kRowElements, 0, static_cast<int>(token - batch * p.queries),
                   static_cast<int>(batch));
        }
      }
      q_at.advance();
    }
    const int64_t before = (paged && p.pools == 1 ? 0 : batch) * pool_rows;  // rows of k
    const char* k = static_cast<const char*>(p.k) + before * Tr::kChannelBytes + chunk * 16;
    // Without this the compiler adds the batch to every row before it multiplies by the row's size.
    asm("" : "+l"(k));
    const float* const scales = p.k_scale + (p.k_scale ? before : 0);
    const int32_t* const list = x.lists + units.row * x.list_size;
    int tile = units.first + warpgroup;
    // This lane finds two of a tile's rows, and the blocks of the next tile's rows in advance.
    Position at[2] = {{tile * kTile + lane, x.block_size},
                      {tile * kTile + 32 + lane, x.block_size}};
    int first_key[2];
    const auto load_blocks = [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        first_key[i] = load_now(list + at[i].block, at[i].at < units.count, -1);
      }
    };
    load_blocks();
    for (; tile < units.last; tile += Tr::kWarpgroups) {
      int row[2];
      uint32_t is_row[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row[i] = first_key[i] + at[i].offset;
        bool valid = at[i].at < units.count && static_cast<uint32_t>(row[i]) < keys;
        if (paged) {
          const int32_t* const table = p.page_table + batch * p.pages_per_request;
          const int page = load_now(table + row[i] / p.page_size, valid, -1);
          valid = is_mapped_page(p, page);
          row[i] = (valid ? page : 0) * p.page_size + row[i] % p.page_size;
        }
        if (!valid) row[i] = -1;
        is_row[i] = __ballot_sync(~0u, valid);
        at[i].advance(step, x.block_size);
      }
      load_blocks();
      uint64_t* const full = &shared.k_full[warpgroup][k_at.index];
      mbarrier_wait(&shared.k_free[warpgroup][k_at.index], k_at.parity);
      if (lane < 2) {
        shared.is_mapped[warpgroup][k_at.index][lane] = lane == 0 ? is_row[0] : is_row[1];
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(full);
      if (p.k_scale) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          cp_async_4(smem_address(&shared.k_scale[warpgroup][k_at.index][32 * i + lane]),
                     scales + max(row[i], 0), row[i] >= 0);
        }
      }
      uint32_t to[kOffsets];
#pragma unroll
      for (int i = 0; i < kOffsets; ++i) {
        to[i] = whole_sum(smem_address(shared.k[warpgroup][k_at.index]), offset[i]);
      }
      const auto copy = [&](auto is_whole) {
#pragma unroll
        for (int i = 0; i < kTile / kRows; ++i) {
          const int from = __shfl_sync(~0u, row[i * kRows / 32], i * kRows % 32 + sub);
          cp_async_16(to[i % kOffsets] + i / kOffsets * 1024, k + int64_t{from} * Tr::kChannelBytes,
                      is_whole.value || from >= 0, policy);
        }
      };
      if ((is_row[0] & is_row[1]) == ~0u) {
        copy(std::true_type());
      } else {
        copy(std::false_type());
      }
      cp_async_arrive(full);
      k_at.advance();
    }
  }
}

// ---- products ----------------------------------------------------------------------------------

// What sum_heads needs to know of one query whose heads are padded to kHeads_. The product has
// further columns, which are not summed.
template <typename Tr, int kHeads_>
struct OneQuery {
  static constexpr int kN = Tr::kN, kHeads = kHeads_, kOwnQueries = 1;
  static constexpr bool kReluBySum = Tr::kReluBySum;
};

template <typename Tr>
__device__ __forceinline__ float sum_of_heads(const IndexerFwdParams& p,
                                              const float (&x)[Tr::kN / 2],
                                              const float (&w)[Tr::kN / 4], int lane) {
  const auto padded = [&]<int kHeads>() {
    float sum[1];
    if (p.relu) {
      sum_heads<OneQuery<Tr, kHeads>, true>(x, w, lane, sum);
    } else {
      sum_heads<OneQuery<Tr, kHeads>, false>(x, w, lane, sum);
    }
    return sum[0];
  };
  return p.heads <= 16   ? padded.template operator()<16>()
         : p.heads <= 32 ? padded.template operator()<32>()
                         : padded.template operator()<64>();
}

template <typename Tr>
__device__ void score(const IndexerFwdParams& p, const CandidateRows& x, int segment_tiles,
                      CandidateShared<Tr>& shared, int warpgroup) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int own_row = warp * 16 + lane / 4 + lane % 2 * 8;
  const uint64_t q = uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.q)));
  const uint64_t k =
      uniform(k_major_rows_descriptor<Tr::kRowBytes>(smem_address(shared.k[warpgroup])));
  RingPlace<Tr::kQStages> q_at;
  RingPlace<Tr::kKeyStages> k_at;
  for (Units units(x, segment_tiles); units.next();) {
    const float* const weights = p.weights + (x.first_token + units.row) * p.heads;
    float w[Tr::kN / 4];
#pragma unroll
    for (int i = 0; i < Tr::kN / 4; ++i) {
      const int head = i / 2 * 8 + i % 2 + lane % 4 * 2;
      w[i] = head < p.heads ? __ldg(weights + head) : 0.f;
      if (Tr::kReluBySum) w[i] *= 0.5f;
    }
    float* const out = x.logits + units.row * x.size;
    mbarrier_wait(&shared.q_full[q_at.index], q_at.parity);
    for (int tile = units.first + warpgroup; tile < units.last; tile += Tr::kWarpgroups) {
      mbarrier_wait(&shared.k_full[warpgroup][k_at.index], k_at.parity);
      float d[Tr::kN / 2];
      wgmma_fence();
      multiply<Tr>(d, moved(k, k_at.index * Tr::kKeyBytes), moved(q, q_at.index * Tr::kQBytes));
      const float scale = p.k_scale ? shared.k_scale[warpgroup][k_at.index][own_row] : 1.f;
      const bool is_mapped =
          shared.is_mapped[warpgroup][k_at.index][own_row / 32] >> own_row % 32 & 1;
      wgmma_wait<0>();
      wgmma_pin(d);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.k_free[warpgroup][k_at.index]);
      k_at.advance();
      const float sum = sum_of_heads<Tr>(p, d, w, lane);
      const int at = tile * kTile + own_row;
      // Two lanes have each sum.
      if (lane / 2 % 2 == 0 && at < units.count)
        __stcs(out + at, is_mapped ? sum * scale : -INFINITY);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.q_free[q_at.index]);
    q_at.advance();
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    candidate_kernel(const __grid_constant__ IndexerFwdParams p,
                     const __grid_constant__ CandidateRows x, int segment_tiles,
                     const __grid_constant__ CUtensorMap q_map) {
  auto& shared = dynamic_shared<CandidateShared<Tr>>();
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q_map);
    for (int i = 0; i < Tr::kQStages; ++i) {
      mbarrier_init(&shared.q_full[i], 1);
      mbarrier_init(&shared.q_free[i], Tr::kConsumerThreads / 32);
    }
    for (int i = 0; i < Tr::kWarpgroups * Tr::kKeyStages; ++i) {
      mbarrier_init(&shared.k_full[0][i], kCopyArrivals);
      mbarrier_init(&shared.k_free[0][i], 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x / 128));
  if (warpgroup < Tr::kWarpgroups) {
    score<Tr>(p, x, segment_tiles, shared, warpgroup);
  } else {
    gather<Tr>(p, x, segment_tiles, q_map, shared, threadIdx.x / 32 % 4);
  }
}

}  // namespace jax_dsa::indexer
