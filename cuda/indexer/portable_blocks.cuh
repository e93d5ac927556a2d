// Block maxima of the indexer for heads that select for themselves, with instructions of sm_80.
// block_max.cuh has the mathematics.
//
// Tiling. A work tile is 256 rows, which are queries and heads; see block_plan.cuh. Each of the
// four warps holds 64 rows in registers as the left operand. Tiles of 64 keys pass through two
// buffers: cp.async fills one while the warps multiply the other. Each tile has one barrier. A unit
// is one block of keys, and tiles begin at its first key. Two CTAs share an SM.
//
// Maxima. A warp multiplies its rows with 16 keys at a time. A thread keeps the largest logit and
// its key for the columns that it has of each of its 8 rows, with a maximum, a comparison and a
// select per accumulator. At the end of a block, four lanes compare theirs.
//
// Shared memory for 256 bytes of channels: 2 key tiles of 16 KiB, in which the rows lie at first.
#pragma once

#include "indexer/block_plan.cuh"
#include "indexer/fwd_plan.cuh"
#include "indexer/portable_products.cuh"

namespace jax_dsa::indexer {

template <typename Tr_>
struct PortableBlockTraits : Tr_ {
  static constexpr int kRows = kCtaRows, kThreads = kPortableThreads;
};

template <typename Tr>
struct alignas(128) PortableBlockShared {
  uint8_t tiles[2][Tr::kTileBytes];  // the warps' rows, then keys
  float scales[2][kTileRows];
  int ends[Tr::kRows];  // of the keys that a row sees, counted from the start of the span
  int64_t warp_sums[kPortableWarps];
  BlockWork work;
};

// The largest logits of 64 rows, among some columns, and the first keys that have them.
struct BlockMaxima {
  float logit[4][2];
  int key[4][2];
  uint32_t nan_rows;  // one bit per row whose key is that of a NaN

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) logit[i / 2][i % 2] = -INFINITY, key[i / 2][i % 2] = -1;
    nan_rows = 0;
  }

  // Adds the products of 16 keys, the first of which in this lane is `first`.
  __device__ __forceinline__ void add(const float (&x)[4][8], int first) {
    bool any_nan = false;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float y = x[m][i / 2 * 4 + 2 * r + i % 2];
          if (y > logit[m][r]) key[m][r] = first + i / 2 * 8 + i % 2;
          logit[m][r] = max_nan(logit[m][r], y);
        }
        any_nan |= isnan(logit[m][r]);
      }
    }
    if (any_nan) add_nan(x, first);
  }

  // Finds the keys of NaN in rows that have had none.
  __device__ __forceinline__ void add_nan(const float (&x)[4][8], int first) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t bit = 1u << (2 * m + r);
        if (!isnan(logit[m][r]) || (nan_rows & bit)) continue;
        nan_rows |= bit;
#pragma unroll
        for (int i = 3; i >= 0; --i) {
          if (isnan(x[m][i / 2 * 4 + 2 * r + i % 2])) key[m][r] = first + i / 2 * 8 + i % 2;
        }
      }
    }
  }

  // Compares the maxima of the four lanes that share rows. `best` gets those of rows own_row(0) and
  // own_row(1).
  __device__ __forceinline__ void reduce(BlockScore (&best)[2]) const {
    const bool odd = thread_index() & 1, upper = thread_index() & 2;
    BlockScore part[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const BlockScore x = {logit[m][0], key[m][0]}, y = {logit[m][1], key[m][1]};
      part[m] = best_of(odd ? y : x, odd ? x : y, 1);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best[i] = best_of(upper ? part[2 + i] : part[i], upper ? part[i] : part[2 + i], 2);
    }
  }

 private:
  // Returns the better one of `own` and what lane ^ distance gives.
  static __device__ __forceinline__ BlockScore best_of(BlockScore own, BlockScore given,
                                                       int distance) {
    const BlockScore x = {__shfl_xor_sync(~0u, given.logit, distance),
                          __shfl_xor_sync(~0u, given.key, distance)};
    const bool greater = isnan(x.logit) ? !isnan(own.logit) : x.logit > own.logit;
    const bool equal = isnan(x.logit) ? isnan(own.logit) : x.logit == own.logit;
    return greater || (equal && x.key < own.key) ? x : own;
  }
};

// A tile of 64 keys or fewer in a unit. Keys count from the start of the span.
struct BlockTile {
  int unit, key;
};

template <typename Tr>
__global__ void __launch_bounds__(kPortableThreads, 2)
    portable_block_kernel(const __grid_constant__ BlockMaxParams params) {
  const IndexerFwdParams& p = params.in;
  auto& shared = dynamic_shared<PortableBlockShared<Tr>>();
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int64_t rows = p.queries * p.heads;
  const bool paged = p.page_table != nullptr;
  const int64_t pool_rows = paged ? int64_t{p.pages} * p.page_size : p.keys;
  const float floor = p.relu ? 0.f : -INFINITY;
  find_block_work<Tr>(params, shared);
  for (BlockWalk<Tr> walk(params, shared.work); walk.next();) {
    // ---- rows
    __syncthreads();  // the tiles and ends before have been read
    int least_end = INT_MAX;
#pragma unroll
    for (int i = 0; i < kHeldRows; i += 32) {
      const int r = warp * kHeldRows + i + lane;
      int end = 0;
      if (walk.row + r < rows) {
        const Span seen = seen_keys(p, walk.batch, (walk.row + r) / p.heads);
        if (seen.start == walk.span.start) end = max(seen.end - seen.start, 0);
      }
      shared.ends[r] = end;
      least_end = min(least_end, end);
    }
    least_end = __reduce_min_sync(~0u, least_end);
    const int64_t warp_row = walk.row + warp * kHeldRows;
    HeldRows<Tr> held;
    const char* const q =
        static_cast<const char*>(p.q) + (walk.batch * rows + warp_row) * Tr::kChannelBytes;
    hold_rows(held, smem_address(shared.tiles) + warp * (Tr::kTileBytes / 2), p.q,
              [&](int r) { return warp_row + r < rows ? q + r * Tr::kChannelBytes : nullptr; });
    __syncthreads();  // the tiles are free for keys

    // ---- tiles of keys
    const int64_t before = (paged && p.pools == 1 ? 0 : walk.batch) * pool_rows;  // rows of k
    const auto row_of = [&](BlockTile tile) {  // the tile's first row, or -1 if it is unmapped
      const int key = walk.span.start + tile.key;
      if (!paged) return key;
      const int page = __ldg(page_entry(p, walk.batch, key / kTile));
      return is_mapped_page(p, page) ? row_in_pool(p, key / kTile, page) : -1;
    };
    const auto keys_left = [&](BlockTile tile) {  // from the tile's first key to the unit's last
      return unit_range(params, walk.span, tile.unit).end - tile.key;
    };
    // Issues the copies of a tile. Returns its first row.
    const auto load = [&](BlockTile tile, int buffer) {
      const int first = row_of(tile), count = first < 0 ? 0 : keys_left(tile);
      const int row = thread_index() / 8, chunk = thread_index() % 8;
      const char* const from =
          static_cast<const char*>(p.k) + (before + max(first, 0)) * Tr::kChannelBytes;
#pragma unroll
      for (int i = row; i < kTileRows; i += kPortableThreads / 8) {
        copy_chunk<Tr, kTileRows>(smem_address(shared.tiles[buffer]), i, chunk,
                                  i < count ? from + i * Tr::kChannelBytes : nullptr, p.q);
      }
      const int i = thread_index();
      if (p.k_scale && i < kTileRows) {
        cp_async_4(smem_address(&shared.scales[buffer][i]),
                   p.k_scale + (i < count ? before + first + i : 0), i < count);
      }
      cp_async_commit();
      return first;
    };
    const auto next = [&](BlockTile tile) {
      const int count = keys_left(tile);
      return count > kTileRows ? BlockTile{tile.unit, tile.key + kTileRows}
                               : BlockTile{tile.unit + 1, tile.key + count};
    };
    BlockTile tile = {walk.first, walk.first * params.unit_keys};
    int row = load(tile, 0), buffer = 0;
    BlockMaxima best;
    best.clear();
#pragma unroll 1
    while (tile.unit < walk.last) {
      const BlockTile upcoming = next(tile);
      int upcoming_row = 0;
      cp_async_wait_group<0>();
      __syncthreads();
      if (upcoming.unit < walk.last) upcoming_row = load(upcoming, buffer ^ 1);
      const int left = row < 0 || warp_row >= rows ? 0 : keys_left(tile);
      const bool whole = min(left, least_end - tile.key) >= kTileRows;
#pragma unroll 1
      for (int pair = 0; pair < min(ceil_div(left, kPairRows), kTileRows / kPairRows); ++pair) {
        float x[4][8];
        multiply_held(x, held, smem_address(shared.tiles[buffer]), pair);
        const int column = pair * kPairRows + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float2 scale = {1.f, 1.f};
          if (p.k_scale) {
            scale = *reinterpret_cast<const float2*>(&shared.scales[buffer][column + 8 * i]);
          }
#pragma unroll
          for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              float& a = x[m][4 * i + 2 * r];
              float& b = x[m][4 * i + 2 * r + 1];
              a = max_nan(a, floor) * scale.x, b = max_nan(b, floor) * scale.y;
            }
          }
        }
        if (!whole) {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int end = shared.ends[warp * kHeldRows + 16 * m + 8 * r + lane / 4];
              const int limit = min(left, end - tile.key) - column;
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                if (i / 2 * 8 + i % 2 >= limit) x[m][i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
              }
            }
          }
        }
        best.add(x, walk.span.start + tile.key + column);
      }
      if (upcoming.unit != tile.unit) {
        BlockScore found[2];
        best.reduce(found);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t list = walk.batch * rows + warp_row + own_row(i);
          if (tile.unit * params.unit_keys < shared.ends[warp * kHeldRows + own_row(i)]) {
            params.scores[list * params.blocks + tile.unit] = found[i];
          }
        }
        best.clear();
      }
      buffer ^= 1;
      tile = upcoming, row = upcoming_row;
    }
  }
}

}  // namespace jax_dsa::indexer
