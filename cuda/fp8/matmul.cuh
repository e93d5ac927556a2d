// FP8 matmul for many rows: persistent, by tiles of 256x128, 192x128 or 128x128.
//
// Two warpgroups multiply, each half of a tile's rows, 64 at a time, or three, a third each. Two
// blocks of a cluster have tiles side by side and share a.
//
// Shared memory: three stages of 48 KiB (four of 40 KiB, five of 32 KiB) with their scales, and
// room for a tile of the product, which TMA stores while the next one is on its way.
#pragma once

#include "fp8/matmul_tile.cuh"
#include "fp8/pack.cuh"

namespace jax_dsa::fp8 {

inline constexpr int kTileGroup = 8;  // rows of clusters' tiles that are gone through together

// Whether rows of the product are such as TMA takes.
__host__ __device__ inline bool stored_by_tma(const Fp8MatmulParams& p) {
  const uint64_t row_bytes = p.n * (p.dtype == DType::kF32 ? 4 : 2);
  return (row_bytes | reinterpret_cast<uintptr_t>(p.out)) % 16 == 0;
}

template <typename Tr>
struct Shared {
  Ring<Tr> ring;
  alignas(1024) uint8_t pieces[Tr::kMathThreads / 32][Tr::kPieces][kPieceBytes];
};

// How many tiles there are; a cluster's counts as one.
template <typename Tr>
struct Tiles {
  int rows, columns, all;  // rows and columns of one batch
  __host__ __device__ explicit Tiles(const Fp8MatmulParams& p)
      : rows(static_cast<int>(ceil_div(p.m, int64_t{Tr::kRows}))),
        columns(static_cast<int>(ceil_div(p.n, int64_t{Tr::kRanks * Tr::kColumns}))),
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
    item.column = (column * Tr::kRanks + rank) * Tr::kColumns;
    next_tile += static_cast<int>(gridDim.x) / Tr::kRanks;
    return true;
  }
};

// A multiplying warp's way to the product in memory: pieces of 8 rows of 128 bytes, which TMA
// stores while the warp goes on to multiply. Where rows of the product are no multiple of 16 bytes,
// the warp stores them itself.
template <typename Tr>
struct Store {
  static constexpr int kSet = Tr::kPieces / Tr::kHalves;  // pieces that go together

  const Fp8MatmulParams& p;
  const CUtensorMap& map;
  uint8_t (&pieces)[Tr::kPieces][kPieceBytes];
  const int lane = threadIdx.x % 32;
  int next = 0;  // set

  // Sums of 16 rows, from `row`, as the multiplier's.
  template <typename T>
  __device__ __forceinline__ void rows(const Item& item, int row, const float (&sum)[Tr::kSums]) {
    constexpr int kWide = 128 / sizeof(T), kAcross = Tr::kColumns / kWide;
    constexpr int kDown = kSet / kAcross;  // times 8 rows
    static_assert(kDown * kAcross == kSet);
#pragma unroll
    for (int first = 0; first < 2; first += kDown) {
      uint8_t (*const set)[kPieceBytes] = pieces + next * kSet;
      next = next + 1 < Tr::kHalves ? next + 1 : 0;
      if (lane == 0) bulk_wait_read<Tr::kHalves - 1>();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kSet; ++i) {
        fill<T>(set[i], sum + i % kAcross * kWide / 2 + 2 * (first + i / kAcross));
      }
      const auto place = [&](int i, auto f) {
        f(item.batch, row + 8 * (first + i / kAcross), item.column + i % kAcross * kWide, set[i]);
      };
      if (stored_by_tma(p)) {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
#pragma unroll
          for (int i = 0; i < kSet; ++i) {
            place(i, [&](int batch, int y, int x, uint8_t* piece) {
              tma_store(&map, piece, x, y, batch);
            });
          }
          bulk_commit();
        }
      } else {
        __syncwarp();
        for (int i = 0; i < kSet; ++i) {
          place(i, [&](int batch, int y, int x, uint8_t* piece) { store<T>(batch, y, x, piece); });
        }
        __syncwarp();
      }
    }
  }

  // `x` has two values of this lane's row, of every eight columns; they are four apart.
  template <typename T>
  __device__ __forceinline__ void fill(uint8_t* piece, const float* x) const {
    const auto at = [](int row, int chunk) { return row * 128 + (chunk ^ row) * 16; };
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int to = at(lane / 4, 2 * g + lane % 4 / 2) + lane % 2 * 8;
        *reinterpret_cast<float2*>(piece + to) = {x[4 * g], x[4 * g + 1]};
      }
    } else {
#pragma unroll
      for (int g = 0; g < 8; g += 4) {  // four 8x8 matrices
        store_matrix_x4(smem_address(piece) + at(lane % 8, g + lane / 8),
                        pack<T>(x[4 * g], x[4 * g + 1]), pack<T>(x[4 * g + 4], x[4 * g + 5]),
                        pack<T>(x[4 * g + 8], x[4 * g + 9]), pack<T>(x[4 * g + 12], x[4 * g + 13]));
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void store(int batch, int row, int column,
                                        const uint8_t* piece) const {
    constexpr int kWide = 128 / sizeof(T), kChunk = 16 / sizeof(T);
    T* const out = static_cast<T*>(p.out) + (batch * p.m + row) * p.n + column;
    for (int r = 0; r < 8 && row + r < p.m; ++r) {
#pragma unroll
      for (int c = lane; c < kWide; c += 32) {
        const auto* chunk = piece + r * 128 + (c / kChunk ^ r) * 16;
        if (column + c < p.n) out[r * p.n + c] = reinterpret_cast<const T*>(chunk)[c % kChunk];
      }
    }
  }

  __device__ __forceinline__ void end() const {
    if (lane == 0) bulk_wait_read<0>();
  }
};

// A warpgroup's sums of 64 rows to memory.
template <typename Tr>
__device__ __forceinline__ void store_half(Store<Tr>& store, const Item& item, int row,
                                           const float (&sum)[Tr::kSums]) {
  if (store.p.dtype == DType::kF32) {
    store.template rows<float>(item, row, sum);
  } else if (store.p.dtype == DType::kBF16) {
    store.template rows<__nv_bfloat16>(item, row, sum);
  } else {
    store.template rows<__half>(item, row, sum);
  }
}

// 256 rows: a warpgroup has two halves, one after the other. 192 rows: three have one each.
template <typename Tr>
__device__ void math_halves(Walk<Tr> walk, Multiplier<Tr> multiplier, Store<Tr> store) {
  const int own_row = multiplier.own_row - multiplier.lane / 4;
  while (walk.next()) {
    float sum[Tr::kHalves][Tr::kSums] = {};
#pragma unroll 1
    for (int left = walk.item.last; left > 1; --left) {
      multiplier.add(sum, [](int) {});
    }
    multiplier.add(sum, [&](int h) {
      store_half(store, walk.item, walk.item.row + own_row + 64 * h, sum[h]);
    });
  }
  store.end();
}

// 128 rows and columns: there are registers for two products, and the next one begins before the
// last one is added.
template <typename Tr>
__device__ void math_ahead(Walk<Tr> walk, Multiplier<Tr> multiplier, Store<Tr> store) {
  const int own_row = multiplier.own_row - multiplier.lane / 4;
  RingPlace<Tr::kStages> ahead;
  while (walk.next()) {
    float d[2][Tr::kSums], sum[Tr::kSums] = {};
    const auto step = [&](float (&now)[Tr::kSums], float (&next)[Tr::kSums]) {
      const float2 own = multiplier.scales(0);
      multiplier.await(ahead);
      multiplier.begin(ahead, next);
      wgmma_wait<1>();
      multiplier.end(now, own, sum);
    };
    const auto last = [&](float (&now)[Tr::kSums]) {
      const float2 own = multiplier.scales(0);
      wgmma_wait<0>();
      multiplier.end(now, own, sum);
    };
    multiplier.await(ahead);
    multiplier.begin(ahead, d[0]);
    int left = walk.item.last;
#pragma unroll 1
    for (; left > 2; left -= 2) {
      step(d[0], d[1]);
      step(d[1], d[0]);
    }
    if (left == 2) {
      step(d[0], d[1]);
      last(d[1]);
    } else {
      last(d[0]);
    }
    store_half(store, walk.item, walk.item.row + own_row, sum);
  }
  store.end();
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kBlocks)
    matmul_kernel(const __grid_constant__ Fp8MatmulParams p,
                  const __grid_constant__ CUtensorMap a_map,
                  const __grid_constant__ CUtensorMap b_map,
                  const __grid_constant__ CUtensorMap out_map) {
  auto& shared = dynamic_shared<Shared<Tr>>();
  if (threadIdx.x == 0) {
    tma_prefetch_map(&a_map);
    tma_prefetch_map(&b_map);
    if (stored_by_tma(p)) tma_prefetch_map(&out_map);
    shared.ring.init();
  }
  if (Tr::kRanks > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < Tr::kMathThreads) {
    raise_registers<Tr::kMathRegisters>();
    const Multiplier<Tr> multiplier(shared.ring);
    const Store<Tr> store = {p, out_map, shared.pieces[threadIdx.x / 32]};
    if constexpr (Tr::kHalves > 1 || Tr::kGroups > 2) {
      math_halves<Tr>(Walk<Tr>(p), multiplier, store);
    } else {
      math_ahead<Tr>(Walk<Tr>(p), multiplier, store);
    }
  } else {
    lower_registers<Tr::kOtherRegisters>();
    produce<Tr>(Walk<Tr>(p), p, a_map, b_map, shared.ring);
  }
  if (Tr::kRanks > 1) cluster_join();  // the other block still writes here
}

}  // namespace jax_dsa::fp8
