// FP8 matmul for many rows: persistent, by tiles of 256 (or 128) rows and 128 columns.
//
// Two warpgroups multiply, each half of a tile's rows, 64 at a time, while the other promotes. Two
// blocks of a cluster have the same rows and neighbouring columns: each copies half of the rows to
// both, so that a cluster's tile is 256 x 256 to the L2.
//
// Shared memory: four stages of 48 KiB (six of 32 KiB with 128 rows) with their scales, and 2 KiB
// for each warp to turn its accumulators into rows of 128 bytes.
#pragma once

#include "fp8/matmul_tile.cuh"
#include "fp8/pack.cuh"

namespace jax_dsa::fp8 {

inline constexpr int kTileGroup = 8;  // rows of tiles that are gone through column by column

template <typename Tr>
struct Shared {
  Ring<Tr> ring;
  uint8_t staging[Tr::kMathThreads / 32][16 * 128];
};

// How many tiles there are; a cluster's counts as one.
template <typename Tr>
struct Tiles {
  int rows, columns, all;  // rows and columns of one batch
  __host__ __device__ explicit Tiles(const Fp8MatmulParams& p)
      : rows(static_cast<int>(ceil_div(p.m, int64_t{Tr::kRows}))),
        columns(static_cast<int>(ceil_div(p.n, int64_t{kColumns * Tr::kRanks}))),
        all(static_cast<int>(p.batch) * rows * columns) {}
};

// The tiles of a block: every cluster's turn comes again after all others'. Tiles at work at a time
// are of few rows and few columns, whose operands stay in the L2.
template <typename Tr>
struct Walk {
  Tiles<Tr> tiles;
  int next_tile;
  Item item;

  __device__ explicit Walk(const Fp8MatmulParams& p)
      : tiles(p),
        next_tile(static_cast<int>(blockIdx.x) / Tr::kRanks),
        item{0, 0, 0, 0, static_cast<int>(ceil_div(p.k, int64_t{kDepth}))} {}

  __device__ bool next() {
    if (next_tile >= tiles.all) return false;
    const int of_batch = tiles.rows * tiles.columns;
    const int batch = next_tile / of_batch, tile = next_tile - batch * of_batch;
    const int group = tile / (kTileGroup * tiles.columns) * kTileGroup;
    const int within = tile - group * tiles.columns, high = min(kTileGroup, tiles.rows - group);
    const int column = within / high, row = group + within - column * high;
    const int rank = Tr::kRanks > 1 ? cluster_rank() : 0;
    item.batch = batch;
    item.row = row * Tr::kRows;
    item.column = (column * Tr::kRanks + rank) * kColumns;
    next_tile += static_cast<int>(gridDim.x) / Tr::kRanks;
    return true;
  }
};

// A warp's sums of 16 rows, from `row`, and 128 columns in f32, straight from the registers: four
// lanes fill a sector.
__device__ __forceinline__ void store_f32(const Fp8MatmulParams& p, const Item& item, int row,
                                          int lane, const float (&sum)[64]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t m = int64_t{row} + lane / 4 + 8 * r;
    if (m >= p.m) continue;
    float* const to = static_cast<float*>(p.out) + (item.batch * p.m + m) * p.n;
#pragma unroll
    for (int g = 0; g < 16; ++g) {
      const int64_t n = int64_t{item.column} + 8 * g + lane % 4 * 2;
      const float2 x = {sum[4 * g + 2 * r], sum[4 * g + 2 * r + 1]};
      if (p.n % 2 == 0) {
        if (n < p.n) *reinterpret_cast<float2*>(to + n) = x;
      } else {
        if (n < p.n) to[n] = x.x;
        if (n + 1 < p.n) to[n + 1] = x.y;
      }
    }
  }
}

// The same in 16 bits, 64 columns at a time through the warp's `staging`, whose rows of 128 bytes
// are swizzled.
template <typename T>
__device__ __forceinline__ void store_16_bits(const Fp8MatmulParams& p, const Item& item, int row,
                                              int lane, const float (&sum)[64], uint8_t* staging) {
  const auto at = [](int r, int chunk) { return r * 128 + (chunk ^ r % 8) * 16; };
  const uint32_t address = smem_address(staging);
  T* const out = static_cast<T*>(p.out) + (item.batch * p.m + row) * p.n;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns: four 8x8 matrices
      const float* const x = sum + 32 * half + 8 * j;
      store_matrix_x4(address + at(lane % 16, 2 * j + lane / 16), pack<T>(x[0], x[1]),
                      pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
    }
    __syncwarp();
    const int64_t first = int64_t{item.column} + 64 * half;
    if (p.n % 8 == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * i + lane / 8;
        const int64_t n = first + lane % 8 * 8;
        uint32_t x[4];
        load_shared_16(address + at(r, lane % 8), x);
        store_16(out + r * p.n + n, x, row + r < p.m && n < p.n);
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < 16 && row + r < p.m; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = lane + 32 * i;
          const T x = reinterpret_cast<const T*>(staging + at(r, c / 8))[c % 8];
          if (first + c < p.n) out[r * p.n + first + c] = x;
        }
      }
    }
    __syncwarp();
  }
}

template <typename Tr>
__device__ void math(Walk<Tr> walk, const Fp8MatmulParams& p, Shared<Tr>& shared) {
  Multiplier<Tr> multiplier(shared.ring);
  const int lane = multiplier.lane, warp = threadIdx.x / 32;
  const int own_row = multiplier.own_row - lane / 4;
  multiplier.begin();
  while (walk.next()) {
    float sum[Tr::kHalves][64] = {};
    for (int left = walk.item.last - walk.item.first; left > 0; --left) multiplier.add(sum);
    uint8_t* const staging = shared.staging[warp];
#pragma unroll
    for (int h = 0; h < Tr::kHalves; ++h) {
      const int row = walk.item.row + own_row + 64 * h;
      if (p.dtype == DType::kF32) {
        store_f32(p, walk.item, row, lane, sum[h]);
      } else if (p.dtype == DType::kBF16) {
        store_16_bits<__nv_bfloat16>(p, walk.item, row, lane, sum[h], staging);
      } else {
        store_16_bits<__half>(p, walk.item, row, lane, sum[h], staging);
      }
    }
  }
  multiplier.end();
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kBlocks)
    matmul_kernel(const __grid_constant__ Fp8MatmulParams p,
                  const __grid_constant__ CUtensorMap a_map,
                  const __grid_constant__ CUtensorMap b_map) {
  auto& shared = dynamic_shared<Shared<Tr>>();
  if (threadIdx.x == 0) {
    tma_prefetch_map(&a_map);
    tma_prefetch_map(&b_map);
    shared.ring.init();
  }
  if (Tr::kRanks > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < Tr::kMathThreads) {
    raise_registers<Tr::kMathRegisters>();
    math<Tr>(Walk<Tr>(p), p, shared);
  } else {
    lower_registers<Tr::kOtherRegisters>();
    produce<Tr>(Walk<Tr>(p), p, a_map, b_map, shared.ring);
  }
  if (Tr::kRanks > 1) cluster_sync();  // the other block still writes here
}

}  // namespace jax_dsa::fp8
