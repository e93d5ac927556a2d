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
// Work: `kQueries` queries, all warpgroups', are an item; its key tiles are those that any of its
// queries sees. All items' key tiles in order are cut into equal shares, one a block: each block
// sums up the items' counts itself, which takes microseconds and needs no other kernel and no
// workspace. The -inf between the items' tiles and the rows' ends are dealt out separately.
//
// Shared memory: q, one or two items ahead (64 KiB each in fp8, 128 KiB in bf16, at 128 channels);
// keys in a ring of tiles, 8 or 6. Rows of 128 bytes or less, swizzled; wider rows in blocks.
#pragma once

#include <climits>

#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "indexer/indexer.h"

namespace jax_dsa::indexer {

// kHeads: heads with padding, 16, 32 or 64; kPaged: keys in pages of whole tiles.
template <IndexerDType kDType_, int kChannels, int kHeads_, bool kPaged_>
struct Traits {
  static constexpr bool kPaged = kPaged_;
  // Those that multiply. Four have no registers for many queries each.
  static constexpr int kWarpgroups = kHeads_ == 64 ? 4 : 2;
  static constexpr int kN = 512 / kWarpgroups;  // columns of a warpgroup's product
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
  static constexpr int kQBytes = kWarpgroups * kN * kChannelBytes;
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

// What an item costs before its first tile, in tiles: its queries and weights must come.
inline constexpr int kItemCost = 2;

// A block's part of the work of all items, in tiles.
struct Share {
  int64_t item;  // the first
  int skip;      // of the first item, an earlier block's
  int64_t work;
};

template <typename Tr>
struct alignas(1024) Shared {
  uint8_t q[Tr::kQStages][Tr::kBlocks][Tr::kWarpgroups][Tr::kN * Tr::kRowBytes];
  uint8_t k[Tr::kKeyStages][Tr::kBlocks][kTile * Tr::kRowBytes];
  uint64_t q_full[Tr::kQStages], q_free[Tr::kQStages];
  uint64_t k_full[Tr::kKeyStages], k_free[Tr::kKeyStages];
  int64_t warp_sums[Tr::kThreads / 32];
  Share share;
};

// ---- work --------------------------------------------------------------------------------------

// A range of key tiles; first == last == 0 if there are none.
struct Tiles {
  int first, last;
};

// Adds query `t` of `batch` to the keys [low, high) seen.
__device__ __forceinline__ void see(const IndexerFwdParams& p, int64_t batch, int64_t t, int& low,
                                    int& high) {
  const int64_t at = batch * p.queries + t;
  const int start = max(__ldg(p.starts + at), 0);
  const int end = min(__ldg(p.ends + at), static_cast<int>(p.keys));
  if (start < end) {
    low = min(low, start);
    high = max(high, end);
  }
}

__device__ __forceinline__ Tiles tiles_of(int low, int high) {
  return low < high ? Tiles{low / kTile, ceil_div(high, kTile)} : Tiles{0, 0};
}

// Where a tile of a request's keys lies in its pool; beyond the pool if its page is not there.
__device__ __forceinline__ int row_in_pool(const IndexerFwdParams& p, int64_t batch, int tile) {
  const int per_page = p.page_size / kTile;
  const int page = __ldg(p.page_table + batch * p.pages_per_request + tile / per_page);
  const bool there = page >= 0 && page < p.pages;
  return (there ? page : p.pages) * p.page_size + (there ? tile % per_page * kTile : 0);
}

// The key tiles that any of `count` queries sees; called by whole warps.
__device__ __forceinline__ Tiles tiles_seen(const IndexerFwdParams& p, int64_t batch, int64_t query,
                                            int count) {
  const int lane = threadIdx.x % 32;
  int low = INT_MAX, high = 0;
  if (lane < count && query + lane < p.queries) see(p, batch, query + lane, low, high);
  return tiles_of(__reduce_min_sync(~0u, low), __reduce_max_sync(~0u, high));
}

// The items of a block's share, one after the other.
template <typename Tr>
struct Walk {
  const IndexerFwdParams& p;
  int64_t item, left;
  int skip;
  int64_t batch, query;  // of the current item
  Tiles tiles;           // of the current item, those of this block

  __device__ Walk(const IndexerFwdParams& p, const Share& share)
      : p(p), item(share.item), left(share.work), skip(share.skip) {}

  __device__ bool next() {
    while (left > 0) {
      const int64_t per_batch = ceil_div(p.queries, int64_t{Tr::kQueries});
      batch = item / per_batch;
      query = (item - batch * per_batch) * Tr::kQueries;
      ++item;
      tiles = tiles_seen(p, batch, query, Tr::kQueries);
      if (tiles.first == tiles.last) continue;
      const int work = kItemCost + tiles.last - tiles.first;
      const int end = static_cast<int>(min(skip + left, int64_t{work}));
      left -= end - skip;
      tiles.last = tiles.first + max(end - kItemCost, 0);
      tiles.first += max(skip - kItemCost, 0);
      skip = 0;
      if (tiles.first < tiles.last) return true;
    }
    return false;
  }
};

template <typename Tr>
__device__ int item_work(const IndexerFwdParams& p, int64_t item, int64_t per_batch) {
  const int64_t batch = item / per_batch, query = (item - batch * per_batch) * Tr::kQueries;
  int low = INT_MAX, high = 0;
#pragma unroll 4
  for (int i = 0; i < Tr::kQueries; ++i) {
    if (query + i < p.queries) see(p, batch, query + i, low, high);
  }
  const Tiles tiles = tiles_of(low, high);
  return tiles.first < tiles.last ? kItemCost + tiles.last - tiles.first : 0;
}

// Finds this block's share; called by all threads.
template <typename Tr>
__device__ void find_share(const IndexerFwdParams& p, Shared<Tr>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t per_batch = ceil_div(p.queries, int64_t{Tr::kQueries});
  const int64_t items = p.batch * per_batch;
  const int64_t chunk = ceil_div(items, int64_t{Tr::kThreads});
  const int64_t first = min(chunk * threadIdx.x, items), last = min(first + chunk, items);
  int64_t own = 0;
  for (int64_t item = first; item < last; ++item) own += item_work<Tr>(p, item, per_batch);
  int64_t up_to = inclusive_scan(own);  // of the warp's lanes, then of all threads before this one
  if (lane == 31) shared.warp_sums[warp] = up_to;
  if (threadIdx.x == 0) shared.share = {0, 0, 0};
  __syncthreads();
  int64_t total = 0;
  up_to -= own;
  for (int i = 0; i < Tr::kThreads / 32; ++i) {
    if (i < warp) up_to += shared.warp_sums[i];
    total += shared.warp_sums[i];
  }
  const int64_t each = total / gridDim.x, more = total % gridDim.x, block = blockIdx.x;
  const int64_t begin = each * block + min(block, more);
  const int64_t work = each + (block < more ? 1 : 0);
  if (work > 0 && up_to <= begin && begin < up_to + own) {
    int64_t item = first, before = up_to;
    for (;;) {
      const int count = item_work<Tr>(p, item, per_batch);
      if (begin < before + count) break;
      before += count;
      ++item;
    }
    shared.share = {item, static_cast<int>(begin - before), work};
  }
  __syncthreads();
}

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

// ---- -inf --------------------------------------------------------------------------------------

// -inf to out[first .. last), by a warp; 16 bytes a lane where the address allows.
__device__ __forceinline__ void fill_row(float* out, int first, int last) {
  const int lane = threadIdx.x % 32;
  if (first >= last) return;
  const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(out + first) / 4 % 4);
  const int body = min(first + (4 - odd) % 4, last), tail = body + (last - body) / 4 * 4;
  if (lane < body - first) __stcs(out + first + lane, -INFINITY);
  const float4 x = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  for (int i = body + 4 * lane; i < tail; i += 128) __stcs(reinterpret_cast<float4*>(out + i), x);
  if (lane < last - tail) __stcs(out + tail + lane, -INFINITY);
}

// The rows' parts before and after their item's key tiles, in pieces of one item and kPiece keys,
// dealt out to the blocks in turn.
template <typename Tr>
__device__ void fill(const IndexerFwdParams& p, int warp) {
  constexpr int kPiece = 4096;
  const int64_t per_batch = ceil_div(p.queries, int64_t{Tr::kQueries});
  const int64_t per_item = ceil_div(p.keys, int64_t{kPiece});
  const int64_t pieces = p.batch * per_batch * per_item;
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const int64_t item = piece / per_item, batch = item / per_batch;
    const int64_t query = (item - batch * per_batch) * Tr::kQueries;
    const Tiles tiles = tiles_seen(p, batch, query, Tr::kQueries);
    const int64_t first = (piece - item * per_item) * kPiece;
    const int64_t last = min(first + kPiece, p.keys);
    const int64_t low = min(int64_t{tiles.first} * kTile, p.keys);
    const int64_t high = min(int64_t{tiles.last} * kTile, p.keys);
    for (int i = warp; i < Tr::kQueries && query + i < p.queries; i += Tr::kFillWarps) {
      float* const row = p.out + (batch * p.queries + query + i) * p.keys;
      fill_row(row, static_cast<int>(first), static_cast<int>(min(last, low)));
      fill_row(row, static_cast<int>(max(first, high)), static_cast<int>(last));
    }
  }
}

// ---- products ----------------------------------------------------------------------------------

// Starts the product; its last kEarly steps are a group of their own.
template <typename Tr>
__device__ __forceinline__ void multiply(float (&d)[Tr::kN / 2], uint64_t k, uint64_t q) {
  constexpr int kSteps = Tr::kChannelBytes / 32;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i == kSteps - Tr::kEarly) wgmma_commit();
    const int block = i * 32 / Tr::kRowBytes, step = i * 32 % Tr::kRowBytes;
    const uint64_t a = moved(k, block * kTile * Tr::kRowBytes + step);
    const uint64_t b = moved(q, block * Tr::kWarpgroups * Tr::kN * Tr::kRowBytes + step);
    if constexpr (Tr::kDType == IndexerDType::kBF16) {
      wgmma_bf16<kKMajor, kKMajor>(d, a, b, i > 0);
    } else {
      wgmma_e4m3(d, a, b, i > 0);
    }
  }
  wgmma_commit();
}

// From a thread's accumulators - rows r and r + 8, columns 2 * (lane % 4) + {0, 1} of each eight -
// the sums of w * relu(x) over heads: lane % 4 = 2 * b + a gets row r + 8 * a of queries 2 * h + b.
template <typename Tr, bool kRelu>
__device__ __forceinline__ void sum_heads(const float (&x)[Tr::kN / 2],
                                          const float (&w)[Tr::kN / 4], int lane,
                                          float (&sum)[Tr::kOwnQueries / 2]) {
  constexpr int kGroups = Tr::kHeads / 8;  // of eight columns, of one query
  float part[Tr::kOwnQueries][2];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int query = 0; query < Tr::kOwnQueries; ++query) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = query * kGroups + g;
          const float score = x[4 * i + 2 * r + e];
          const float y = Tr::kSums ? score + (kRelu ? fabsf(score) : score)
                          : kRelu   ? max_nan(score, 0.f)
                                    : score;
          float& s = part[query][r];
          s = g + e == 0 ? w[2 * i] * y : fmaf(w[2 * i + e], y, s);
        }
      }
    }
  }
  const bool a = lane & 1, b = lane & 2;
  float row[Tr::kOwnQueries];
#pragma unroll
  for (int query = 0; query < Tr::kOwnQueries; ++query) {
    const float other = __shfl_xor_sync(~0u, a ? part[query][0] : part[query][1], 1);
    row[query] = (a ? part[query][1] : part[query][0]) + other;
  }
#pragma unroll
  for (int h = 0; h < Tr::kOwnQueries / 2; ++h) {
    const float other = __shfl_xor_sync(~0u, b ? row[2 * h] : row[2 * h + 1], 2);
    sum[h] = (b ? row[2 * h + 1] : row[2 * h]) + other;
  }
}

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
    } else {
      fill<Tr>(p, warp - 1);
    }
  }
}

}  // namespace jax_dsa::indexer
