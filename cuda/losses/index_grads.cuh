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

#include <climits>
#include <cstdint>

#include "common/gather.cuh"
#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "losses/losses.h"
#include "losses/ranges.cuh"

namespace jax_dsa::index_grads {

inline constexpr int kRows = 64;  // rows of an MMA warpgroup; heads are padded to this number
inline constexpr int kStages = 6;
inline constexpr int kThreads = 384;
static_assert(kIndexGradsKeys == 2 * kRows && kIndexGradsSegment <= 128);

// Which gradient a kernel computes: dq with the heads of queries as rows, or f with keys as rows.
enum class Gradient { kQueries, kKeys };

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

// ---- work tiles --------------------------------------------------------------------------------

// Iterates over the work tiles of dq. `tiles` are key tiles.
template <Gradient kGradient>
struct WorkTiles : QueryWorkTiles {
  __device__ bool next(const IndexGradsParams& p) { return QueryWorkTiles::next(p, 2); }
};

// Iterates over the work tiles of f. `tiles` are queries.
template <>
struct WorkTiles<Gradient::kKeys> {
  int batch, key;  // batch entry and first key of the current work tile
  int segment;
  Tiles tiles;

  __device__ bool next(const IndexGradsParams& p) {
    const int key_tiles = static_cast<int>(ceil_div(p.keys, int64_t{kIndexGradsKeys}));
    const int segments = static_cast<int>(ceil_div(p.queries, int64_t{kIndexGradsSegment}));
    const int entries = static_cast<int>(p.batch), ctas = gridDim.x;
    const int work_tiles = segments * entries * key_tiles;
    while (round * ctas < work_tiles) {
      const int work_tile = round * ctas + (round % 2 ? ctas - 1 - blockIdx.x : blockIdx.x);
      ++round;
      if (work_tile >= work_tiles) continue;
      const int key_tile = work_tile % key_tiles;
      batch = work_tile / key_tiles % entries;
      segment = work_tile / key_tiles / entries;
      key = key_tile * kIndexGradsKeys;
      tiles = queries_that_see(p);
      if (threadIdx.x == 0) {
        p.partial_used[(int64_t{segment} * entries + batch) * key_tiles + key_tile] =
            tiles.first < tiles.last;
      }
      if (tiles.first < tiles.last) return true;
    }
    return false;
  }

 private:
  int round = 0;

  // Returns the range from the first query of the segment that sees any of the keys to the last.
  __device__ Tiles queries_that_see(const IndexGradsParams& p) const {
    int first = INT_MAX, last = 0;
    for (int i = threadIdx.x % 32; i < kIndexGradsSegment; i += 32) {
      const int query = segment * kIndexGradsSegment + i;
      const Range seen = range_of(p, batch, query);
      if (seen.low < key + kIndexGradsKeys && seen.high > key) {
        first = min(first, query);
        last = max(last, query + 1);
      }
    }
    first = __reduce_min_sync(~0u, first);
    last = __reduce_max_sync(~0u, last);
    return first < last ? Tiles{first, last, 0, 0} : Tiles{0, 0, 0, 0};
  }
};

// ---- copies ------------------------------------------------------------------------------------

// The factors that thread `i` of the producer warpgroup writes for a tile.
struct Factors {
  float column_factor, row_factor;
};

__device__ __forceinline__ Factors factors(const IndexGradsParams& p,
                                           const WorkTiles<Gradient::kQueries>& work_tile, int tile,
                                           int i) {
  const int query = work_tile.query + i / kTile, key = tile * kTile + i % kTile;
  if (!range_of(p, work_tile.batch, query).has(key)) return {0.f, 0.f};
  const float g = __ldg(p.grad + (work_tile.batch * p.queries + query) * p.keys + key);
  return {p.k_scale ? g * __ldg(p.k_scale + work_tile.batch * p.keys + key) : g, 0.f};
}

__device__ __forceinline__ Factors factors(const IndexGradsParams& p,
                                           const WorkTiles<Gradient::kKeys>& work_tile, int query,
                                           int i) {
  const int64_t token = work_tile.batch * p.queries + query;
  const bool sees = range_of(p, work_tile.batch, query).has(work_tile.key + i);
  return {i < p.heads ? __ldg(p.weights + token * p.heads + i) : 0.f,
          sees ? __ldg(p.grad + token * p.keys + work_tile.key + i) : 0.f};
}

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
  const int own_row = warp * 16 + lane / 4;   // and own_row + 8
  const uint32_t no_relu = p.relu ? 0 : ~0u;  // without relu, all bits of the mask are set
  const float floor = p.relu ? 0.f : -INFINITY;
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
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 f = *reinterpret_cast<const float2*>(columns + 8 * i);
      const uint32_t rounded = pack_bf16(f.x, f.y);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = fmaxf(x[4 * i + 2 * r], floor), b = fmaxf(x[4 * i + 2 * r + 1], floor);
        if (kGradient == Gradient::kQueries) dw[r] = fmaf(f.y, b, fmaf(f.x, a, dw[r]));
        const uint32_t relu_mask = positive_bf16(pack_bf16(a, b)) | no_relu;
        const uint32_t product = kGradient == Gradient::kQueries
                                     ? rounded
                                     : pack_bf16(f.x * row_factor[r], f.y * row_factor[r]);
        h[i / 2][i % 2 * 2 + r] = product & relu_mask;
      }
    }
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

// ---- sums --------------------------------------------------------------------------------------

// Adds up f over the segments. One warp per key, four channels per lane. After the last chunk of
// queries, it computes dk and dk_scale from f.
static __global__ void __launch_bounds__(256)
    sum_segments_kernel(const __grid_constant__ IndexGradsParams p) {
  const int64_t row = blockIdx.x * int64_t{8} + threadIdx.x / 32;  // batch * keys + key
  const int channel = threadIdx.x % 32 * 4;
  if (row >= p.batch * p.keys) return;
  const int64_t batch = row / p.keys, key = row - batch * p.keys;
  const int64_t key_tiles = ceil_div(p.keys, int64_t{kIndexGradsKeys});
  const int64_t segments = ceil_div(p.queries, int64_t{kIndexGradsSegment});
  const bool in_range = channel < p.channels;
  float* const dk = p.dk + row * p.channels + channel;
  float f[4] = {};
  const auto add = [&](const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    f[0] += x.x, f[1] += x.y, f[2] += x.z, f[3] += x.w;
  };
  if (in_range && !p.first) add(dk);
  for (int64_t segment = 0; segment < segments; ++segment) {
    const int64_t at = segment * p.batch + batch;
    if (!p.partial_used[at * key_tiles + key / kIndexGradsKeys] || !in_range) continue;
    add(p.partial_dk + (at * p.keys + key) * p.channels + channel);
  }
  if (p.last && p.k_scale != nullptr) {
    // For a key that no query sees, f is 0 but k and k_scale may be NaN. The result must be 0.
    const auto finite = [](float x) { return fabsf(x) < INFINITY ? x : 0.f; };
    const float scale = finite(__ldg(p.k_scale + row));
    float sum = 0.f;
    if (in_range) {
      const auto* k = reinterpret_cast<const uint32_t*>(p.k) + (row * p.channels + channel) / 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 x = unpack_bf16(k[i]);
        sum = fmaf(finite(x.x), f[2 * i], fmaf(finite(x.y), f[2 * i + 1], sum));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] *= scale;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (channel == 0) p.dk_scale[row] = sum;
  }
  if (in_range) store_4(dk, f);
}

// Writes zeros to dq and dw of the queries that see no key.
static __global__ void __launch_bounds__(256)
    clear_queries_kernel(const __grid_constant__ IndexGradsParams p) {
  const int64_t token = blockIdx.x;
  const Range seen = range_of(p, token / p.queries, token % p.queries);
  if (seen.low < seen.high) return;
  const int values = p.heads * p.channels;
  for (int i = threadIdx.x; i < values; i += 256) p.dq[token * values + i] = 0.f;
  for (int i = threadIdx.x; i < p.heads; i += 256) p.dweights[token * p.heads + i] = 0.f;
}

}  // namespace jax_dsa::index_grads
