// The products in the backward pass of the indexer's logits at all keys, with instructions of
// sm_80. index_grads.cuh has the mathematics and the work tiles.
//
// Tiling. A CTA takes one work tile: 128 rows, which are the heads of two queries or 128 keys. Each
// of its four warps has 32 rows and multiplies them with every tile of 64 columns, half of it at a
// time. The masked scores are packed in registers and multiplied with the same columns. The sums of
// 32 rows and 128 channels take 128 registers, so the rows are read from shared memory for every
// tile. Two CTAs share an SM where they fit. All sums have a fixed order.
//
// Shared memory for 128 channels: rows 32 KiB, two tiles of 16 KiB, factors 2 KiB.
#pragma once

#include "common/mma_tile.cuh"
#include "losses/index_grads_plan.cuh"

namespace jax_dsa::index_grads {

inline constexpr int kPortableThreads = 128;
inline constexpr int kColumns = 32;  // columns of a tile that are multiplied at a time

// kC is the number of channels, padded to 64 or 128.
template <int kC, Gradient kGradient>
struct alignas(128) PortableShared {
  uint8_t rows[2][kC / 64][kBlockBytes];
  uint8_t tiles[2][kC / 64][kBlockBytes];
  float column_factors[2][2][kTile];  // for kKeys only [slot][0]
  float row_factors[2][2][kRows];     // used only for kKeys
  // What all threads know of the work tile. It is here to save registers.
  WorkTiles<kGradient> work_tile;
  Range seen[2];  // the ranges of the two queries; only for kQueries
};

template <int kC, Gradient kGradient>
__global__ void __launch_bounds__(kPortableThreads, 2)
    portable_index_grads_kernel(const __grid_constant__ IndexGradsParams p) {
  constexpr bool kQueries = kGradient == Gradient::kQueries;
  auto& shared = dynamic_shared<PortableShared<kC, kGradient>>();
  {
    WorkTiles<kGradient> found;
    if (!found.next(p)) return;
    if (threadIdx.x == 0) {
      shared.work_tile = found;
      if constexpr (kQueries) {
        shared.seen[0] = range_of(p, found.batch, found.query);
        shared.seen[1] = range_of(p, found.batch, found.query + 1);
      }
    }
    __syncthreads();
  }
  const WorkTiles<kGradient>& work_tile = shared.work_tile;
  const Tiles& tiles = work_tile.tiles;

  // ---- copies
  const auto copy = [&](uint32_t to, const void* from, int64_t row, auto exists) {
    load_tile<kTile, kC / 64, kPortableThreads>(
        to, static_cast<const uint16_t*>(from) + row * p.channels, p.channels, p.channels, exists);
  };
  const auto copy_heads = [&](uint32_t to, int query) {
    copy(to, p.q, (work_tile.batch * p.queries + query) * p.heads,
         [&](int head) { return head < p.heads && query < p.queries; });
  };
  const auto copy_keys = [&](uint32_t to, int key, auto exists) {
    copy(to, p.k, work_tile.batch * p.keys + key, [&](int row) { return exists(key + row); });
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t to = smem_address(shared.rows[i]);
    if constexpr (kQueries) {
      copy_heads(to, work_tile.query + i);
    } else {
      copy_keys(to, work_tile.key + i * kRows, [&](int key) { return key < p.keys; });
    }
  }
  Factors next = factors(p, work_tile, tiles.first, thread_index());
  const auto load = [&](int tile) {
    if (tile < tiles.last) {
      const uint32_t to = smem_address(shared.tiles[tile % 2]);
      if constexpr (kQueries) {
        copy_keys(to, tile * kTile,
                  [&](int key) { return shared.seen[0].has(key) || shared.seen[1].has(key); });
      } else {
        copy_heads(to, tile);
        (&shared.row_factors[tile % 2][0][0])[thread_index()] = next.row_factor;
      }
      (&shared.column_factors[tile % 2][0][0])[thread_index()] = next.column_factor;
      if (tile + 1 < tiles.last) next = factors(p, work_tile, tile + 1, thread_index());
    }
    cp_async_commit();
  };

  // ---- products. What depends on the thread is recomputed where it is used, which saves
  // registers.
  const auto lane = [] { return thread_index() & 31; };
  const auto half = [] { return thread_index() / 64; };
  const auto warp_row = [] { return thread_index() / 32 % 2 * 32; };
  const auto column = [&] { return lane() % 4 * 2; };
  float out[2][kC / 2], dw[2][2] = {};
  clear_fragments(out);
  load(tiles.first);
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.last; ++tile) {
    cp_async_wait_group<0>();
    __syncthreads();
    load(tile + 1);
    const uint32_t columns = smem_address(shared.tiles[tile % 2]);
#pragma unroll 1
    for (int first = 0; first < kTile; first += kColumns) {
      float x[2][kColumns / 2];
      clear_fragments(x);
      multiply_tiles<DType::kBF16, kC / 16>(
          x, Operand<Side::kA, false, kTile>(smem_address(shared.rows[half()]), warp_row(), 0),
          Operand<Side::kB, false, kTile>(columns, first, 0));
      uint32_t h[2][kColumns / 16][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float row_factor[2];
        if constexpr (!kQueries) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            row_factor[r] =
                shared.row_factors[tile % 2][half()][warp_row() + m * 16 + lane() / 4 + r * 8];
          }
        }
        make_h<kGradient>(x[m],
                          shared.column_factors[tile % 2][kQueries ? half() : 0] + first + column(),
                          row_factor, Relu(p.relu), dw[m], h[m]);
      }
      multiply_tiles<DType::kBF16, kColumns / 16>(
          out, RegisterOperand<2, kColumns / 16>{h},
          Operand<Side::kB, true, kTile>(columns, first, 0));
    }
  }

  // ---- results
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int m = i / 2, r = i % 2, row = warp_row() + i * 8 + lane() / 4;
    float* to;
    float scale = 1.f;
    bool in_range;
    if constexpr (kQueries) {
      dw[m][r] += __shfl_xor_sync(~0u, dw[m][r], 1);
      dw[m][r] += __shfl_xor_sync(~0u, dw[m][r], 2);
      const int query = work_tile.query + half();
      const int64_t at = (work_tile.batch * p.queries + query) * p.heads + row;
      in_range = row < p.heads && query < p.queries;
      if (in_range) scale = __ldg(p.weights + at);
      if (in_range && lane() % 4 == 0) p.dweights[at] = dw[m][r];
      to = p.dq + at * p.channels;
    } else {
      const int key = work_tile.key + half() * kRows + row;
      in_range = key < p.keys;
      to = p.partial_dk +
           ((work_tile.segment * p.batch + work_tile.batch) * p.keys + key) * p.channels;
    }
#pragma unroll
    for (int n = 0; n < kC / 8; ++n) {
      const float a = out[m][4 * n + 2 * r] * scale, b = out[m][4 * n + 2 * r + 1] * scale;
      if (in_range && n * 8 < p.channels) {
        *reinterpret_cast<float2*>(to + 8 * n + column()) = make_float2(a, b);
      }
    }
  }
}

}  // namespace jax_dsa::index_grads
