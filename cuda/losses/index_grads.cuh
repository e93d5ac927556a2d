// The gradients of the indexer's logits at all keys that a query sees. With g = dL/dI, and
//
//     x[t,j,s] = q[t,j] . k[s]        a[t,j,s] = [x > 0]        (a = 1 without relu)
//
//     dq[t,j] = w[t,j] sum_s a g[t,s] ks[s] k[s]        dw[t,j] = sum_s g[t,s] ks[s] a x
//     f[s] = sum_tj a g[t,s] w[t,j] q[t,j]              dk[s] = ks[s] f[s]    dks[s] = k[s] . f[s]
//
// dq and f have the same form: 64 rows (heads of a query; keys) stay, tiles of 64 others (keys;
// heads of a query) pass by, and what a tile adds is the product of gated numbers with the tile,
//
//     out[row] += sum_column h[row, column] tile[column]
//     h = bf16(g[t,s] ks[s]) a        for dq, times w at the end
//     h = bf16(g[t,s] w[t,j]) a       for f
//
// So one kernel is both. The rows that stay are the left operand of x in registers; a thread's
// accumulators of x, gated and packed, are the left operand of the second product as they are; and
// a tile is read twice from shared memory, once K-major and once MN-major. For dk all scores are
// computed once more, which costs a quarter of the products and spares 8 bytes of gates a pair.
//
// Work items: of dq two neighbouring queries and the key tiles that either sees; of f 128 keys and
// the queries of a segment that see any of them. A segment's part of f goes to memory, and a last
// kernel adds the parts in order: nothing depends on the order in which blocks run.
//
// Warpgroups: 0 and 1 multiply, a query or 64 keys each, with the same tiles; 2 copies. A
// multiplying warpgroup moves a tile's scores to other registers and starts those of the next tile
// before it gates them. Keys that neither of two queries sees become zeros.
//
// Shared memory: a ring of 6 tiles (16 KiB at 128 channels, in blocks of 64 columns, 128-byte
// swizzle), each with the numbers that g, ks and w make of it; the rows that stay.
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

inline constexpr int kRows = 64;  // that stay in a warpgroup; heads are padded to so many
inline constexpr int kStages = 6;
inline constexpr int kThreads = 384;
static_assert(kIndexGradsKeys == 2 * kRows && kIndexGradsSegment <= 128);

enum class Of { kQueries, kKeys };  // whose gradients are made: what stays

// kC: channels, padded to 64 or 128.
template <int kC>
struct alignas(1024) Shared {
  uint8_t tiles[kStages][kC / 64][kBlockBytes];
  uint8_t rows[2][kC / 64][kBlockBytes];  // that stay, of a warpgroup
  float of_columns[kStages][2][kTile];    // factors of h: of kKeys the same for both warpgroups
  float of_rows[kStages][2][kRows];       // of kKeys only
  uint64_t rows_full[2], rows_free[2];
  uint64_t full[kStages], free[kStages];
};

// ---- work --------------------------------------------------------------------------------------

// Items of queries: the tiles are numbered key tiles.
template <Of kOf>
struct Items : QueryItems {
  __device__ bool next(const IndexGradsParams& p) { return QueryItems::next(p, 2); }
};

// Items of keys: a tile is a query.
template <>
struct Items<Of::kKeys> {
  int batch, key;  // of the item; its first key
  int segment;
  Tiles tiles;

  __device__ bool next(const IndexGradsParams& p) {
    const int key_blocks = static_cast<int>(ceil_div(p.keys, int64_t{kIndexGradsKeys}));
    const int segments = static_cast<int>(ceil_div(p.queries, int64_t{kIndexGradsSegment}));
    const int entries = static_cast<int>(p.batch), blocks = gridDim.x;
    const int items = segments * entries * key_blocks;
    while (round * blocks < items) {
      const int item = round * blocks + (round % 2 ? blocks - 1 - blockIdx.x : blockIdx.x);
      ++round;
      if (item >= items) continue;
      const int block = item % key_blocks;
      batch = item / key_blocks % entries;
      segment = item / key_blocks / entries;
      key = block * kIndexGradsKeys;
      tiles = queries_that_see(p);
      if (threadIdx.x == 0) {
        p.used[(int64_t{segment} * entries + batch) * key_blocks + block] =
            tiles.first < tiles.last;
      }
      if (tiles.first < tiles.last) return true;
    }
    return false;
  }

 private:
  int round = 0;

  // From the first query of the segment that sees any of the keys to the last.
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

// The factors that thread `i` of a warpgroup writes beside a tile.
struct Factors {
  float of_column, of_row;
};

__device__ __forceinline__ Factors factors(const IndexGradsParams& p,
                                           const Items<Of::kQueries>& item, int tile, int i) {
  const int query = item.query + i / kTile, key = tile * kTile + i % kTile;
  if (!range_of(p, item.batch, query).has(key)) return {0.f, 0.f};
  const float g = __ldg(p.grad + (item.batch * p.queries + query) * p.keys + key);
  return {p.k_scale ? g * __ldg(p.k_scale + item.batch * p.keys + key) : g, 0.f};
}

__device__ __forceinline__ Factors factors(const IndexGradsParams& p, const Items<Of::kKeys>& item,
                                           int query, int i) {
  const int64_t token = item.batch * p.queries + query;
  const bool sees = range_of(p, item.batch, query).has(item.key + i);
  return {i < p.heads ? __ldg(p.weights + token * p.heads + i) : 0.f,
          sees ? __ldg(p.grad + token * p.keys + item.key + i) : 0.f};
}

// What the item reads of `grad` to the L2: a factor is loaded no more than a tile ahead.
__device__ __forceinline__ void prefetch_grads(const IndexGradsParams& p,
                                               const Items<Of::kQueries>& item, int i) {
  const Range seen = range_of(p, item.batch, item.query + i);
  if (i >= 2 || seen.low >= seen.high) return;
  const int low = seen.low / 4 * 4, high = ceil_div(seen.high, 4) * 4;
  prefetch_l2(p.grad + (item.batch * p.queries + item.query + i) * p.keys + low, (high - low) * 4);
}

__device__ __forceinline__ void prefetch_grads(const IndexGradsParams& p,
                                               const Items<Of::kKeys>& item, int i) {
  const int query = item.tiles.first + i;
  if (query >= item.tiles.last) return;
  const int64_t keys = min(p.keys - item.key, int64_t{kIndexGradsKeys});
  prefetch_l2(p.grad + (item.batch * p.queries + query) * p.keys + item.key,
              static_cast<uint32_t>(keys) * 4);
}

template <int kC, Of kOf>
__device__ void copy(const IndexGradsParams& p, Shared<kC>& shared) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
  const int chunk = lane % 8, sub = lane / 8;
  const bool there = kC == 128 || chunk * 8 < p.channels;
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
  const auto aim_at_heads = [&](int64_t token, bool is) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = Gather::row(warp, i, sub);
      gather.valid[i] = is && there && head < p.heads;
      gather.from[i] = q + (gather.valid[i] ? (token * p.heads + head) * row_bytes : 0);
    }
  };
  const auto aim_at_keys = [&](int batch, int first, auto counts) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + Gather::row(warp, i, sub);
      gather.valid[i] = there && counts(key);
      gather.from[i] = k + (gather.valid[i] ? (batch * p.keys + key) * row_bytes : 0);
    }
  };

  for (Items<kOf> item; item.next(p);) {
    const Tiles tiles = item.tiles;
    Range seen[2];
    if constexpr (kOf == Of::kQueries) {
      seen[0] = range_of(p, item.batch, item.query);
      seen[1] = range_of(p, item.batch, item.query + 1);
    }
    if (p.keys % 4 == 0) prefetch_grads(p, item, thread);
    Factors next = factors(p, item, tiles.first, thread);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if constexpr (kOf == Of::kQueries) {
        aim_at_heads(item.batch * p.queries + item.query + side, item.query + side < p.queries);
      } else {
        aim_at_keys(item.batch, item.key + side * kRows, [&](int key) { return key < p.keys; });
      }
      mbarrier_wait(&shared.rows_free[side], rows_parity);
      copy_rows(shared.rows[side], &shared.rows_full[side]);
    }
    rows_parity ^= 1;
    for (int tile = tiles.first; tile < tiles.last; ++tile) {
      const Factors own = next;
      if (tile + 1 < tiles.last) next = factors(p, item, tile + 1, thread);
      if constexpr (kOf == Of::kQueries) {
        aim_at_keys(item.batch, tile * kTile,
                    [&](int key) { return seen[0].has(key) || seen[1].has(key); });
      } else {
        aim_at_heads(item.batch * p.queries + tile, true);
      }
      mbarrier_wait(&shared.free[ring.index], ring.parity ^ 1);
      (&shared.of_columns[ring.index][0][0])[thread] = own.of_column;
      if (kOf == Of::kKeys) (&shared.of_rows[ring.index][0][0])[thread] = own.of_row;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.full[ring.index]);
      copy_rows(shared.tiles[ring.index], &shared.full[ring.index]);
      ring.advance();
    }
  }
}

// ---- products ----------------------------------------------------------------------------------

// Warpgroup `side`.
template <int kC, Of kOf>
__device__ void multiply(const IndexGradsParams& p, Shared<kC>& shared, int side) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, column = lane % 4 * 2;
  const int own_row = warp * 16 + lane / 4;  // and own_row + 8
  const uint32_t all = p.relu ? 0 : ~0u;     // gates that are open whatever x is
  const float floor = p.relu ? 0.f : -INFINITY;
  const uint32_t tiles_at = smem_address(shared.tiles);
  const uint64_t by_channel = uniform(k_major_descriptor(tiles_at));
  const uint64_t by_row = uniform(mn_major_descriptor(tiles_at, kBlockBytes));
  constexpr int kStageBytes = kC / 64 * kBlockBytes;

  uint32_t rows[kC / 16][4], h[4][4];
  float out[kC / 2], scores[32], dw[2];
  RingPlace<kStages> ahead, ring;  // of the next scores; of the tile at hand
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
  const auto free_tile_before = [&] {
    arrive(&shared.free[ring.index == 0 ? kStages - 1 : ring.index - 1]);
  };
  // h and dw of the tile at hand.
  const auto gate = [&](const float (&x)[32]) {
    const float* columns = shared.of_columns[ring.index][kOf == Of::kQueries ? side : 0] + column;
    float of_row[2];
    if (kOf == Of::kKeys) {
#pragma unroll
      for (int r = 0; r < 2; ++r) of_row[r] = shared.of_rows[ring.index][side][own_row + 8 * r];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 f = *reinterpret_cast<const float2*>(columns + 8 * i);
      const uint32_t rounded = pack_bf16(f.x, f.y);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = fmaxf(x[4 * i + 2 * r], floor), b = fmaxf(x[4 * i + 2 * r + 1], floor);
        if (kOf == Of::kQueries) dw[r] = fmaf(f.y, b, fmaf(f.x, a, dw[r]));
        const uint32_t open = positive_bf16(pack_bf16(a, b)) | all;
        const uint32_t gated =
            kOf == Of::kQueries ? rounded : pack_bf16(f.x * of_row[r], f.y * of_row[r]);
        h[i / 2][i % 2 * 2 + r] = gated & open;
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

  for (Items<kOf> item; item.next(p);) {
    dw[0] = dw[1] = 0.f;
    mbarrier_wait(&shared.rows_full[side], rows_parity);
    rows_parity ^= 1;
    const uint32_t from = smem_address(shared.rows[side]) + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      const int chunk = 2 * i + lane / 16;
      load_matrix_x4(from + chunk / 8 * kBlockBytes + ((chunk % 8) ^ (lane % 8)) * 16, rows[i]);
    }
    arrive(&shared.rows_free[side]);

    const int tiles = item.tiles.last - item.tiles.first;
    start_scores();
    wgmma_wait<0>();
    wgmma_pin(scores);
    for (int tile = 0; tile + 1 < tiles; ++tile) {
      float x[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = scores[i];
      start_scores();
      wgmma_wait<1>();  // for the product of the tile before
      if (tile > 0) free_tile_before();
      gate(x);
      start_product(tile > 0);
      wgmma_wait<1>();
      wgmma_pin(scores);
    }
    wgmma_wait<0>();
    if (tiles > 1) free_tile_before();
    gate(scores);
    start_product(tiles > 1);
    wgmma_wait<0>();
    wgmma_pin(out);
    free_tile_before();

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own_row + 8 * r;
      float* to;
      float scale = 1.f;
      bool there;
      if constexpr (kOf == Of::kQueries) {
        dw[r] += __shfl_xor_sync(~0u, dw[r], 1);
        dw[r] += __shfl_xor_sync(~0u, dw[r], 2);
        const int64_t at = (item.batch * p.queries + item.query + side) * p.heads + row;
        there = row < p.heads && item.query + side < p.queries;
        if (there) scale = __ldg(p.weights + at);
        if (there && lane % 4 == 0) p.dweights[at] = dw[r];
        to = p.dq + at * p.channels;
      } else {
        const int key = item.key + side * kRows + row;
        there = key < p.keys;
        to = p.parts + ((item.segment * p.batch + item.batch) * p.keys + key) * p.channels;
      }
#pragma unroll
      for (int i = 0; i < kC / 8; ++i) {
        if (there && i * 8 < p.channels) {
          *reinterpret_cast<float2*>(to + 8 * i + column) =
              make_float2(out[4 * i + 2 * r] * scale, out[4 * i + 2 * r + 1] * scale);
        }
      }
    }
  }
}

template <int kC, Of kOf>
__global__ void __launch_bounds__(kThreads, 1)
    index_grads_kernel(const __grid_constant__ IndexGradsParams p) {
  constexpr int kConsumer = 208, kProducer = 88;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<Shared<kC>>();
  if (threadIdx.x == 0) {
    for (int side = 0; side < 2; ++side) {
      mbarrier_init(&shared.rows_full[side], 128);
      mbarrier_init(&shared.rows_free[side], 4);
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
    multiply<kC, kOf>(p, shared, warpgroup);
  } else {
    lower_registers<kProducer>();
    copy<kC, kOf>(p, shared);
  }
}

// ---- sums --------------------------------------------------------------------------------------

// Adds the parts of f, a warp a key, four channels a lane; after the last queries makes dk of it.
static __global__ void __launch_bounds__(256)
    sum_parts_kernel(const __grid_constant__ IndexGradsParams p) {
  const int64_t row = blockIdx.x * int64_t{8} + threadIdx.x / 32;  // batch * keys + key
  const int channel = threadIdx.x % 32 * 4;
  if (row >= p.batch * p.keys) return;
  const int64_t batch = row / p.keys, key = row - batch * p.keys;
  const int64_t blocks = ceil_div(p.keys, int64_t{kIndexGradsKeys});
  const int64_t segments = ceil_div(p.queries, int64_t{kIndexGradsSegment});
  const bool there = channel < p.channels;
  float* const dk = p.dk + row * p.channels + channel;
  float f[4] = {};
  const auto add = [&](const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    f[0] += x.x, f[1] += x.y, f[2] += x.z, f[3] += x.w;
  };
  if (there && !p.first) add(dk);
  for (int64_t segment = 0; segment < segments; ++segment) {
    const int64_t at = segment * p.batch + batch;
    if (!p.used[at * blocks + key / kIndexGradsKeys] || !there) continue;
    add(p.parts + (at * p.keys + key) * p.channels + channel);
  }
  if (p.last && p.k_scale != nullptr) {
    // What no query uses is multiplied by 0, which must stay 0.
    const auto finite = [](float x) { return fabsf(x) < INFINITY ? x : 0.f; };
    const float scale = finite(__ldg(p.k_scale + row));
    float sum = 0.f;
    if (there) {
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
  if (there) store_4(dk, f);
}

// dq and dw of the queries that see nothing.
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
