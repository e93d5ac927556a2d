// FP8 matmul for few rows, bound by reading b: a cluster's blocks have one tile of 64 or 128 rows
// and 128 columns, or of 16 or 32 rows and 64 columns, and each of them a part of K. They add up
// their sums, in the order of their ranks, by reading each other's shared memory.
//
// One warpgroup multiplies. Two or three blocks share a SM, so that enough bytes are on
// their way; the sums of a tile take the place of the stages.
#pragma once

#include "fp8/matmul.cuh"
#include "fp8/matmul_tile.cuh"

namespace jax_dsa::fp8 {

enum NamedBarrier { kMath = 1 };  // 0 is __syncthreads

template <typename Tr>
inline constexpr int kSumStride = Tr::kColumns + 8;  // floats; eight rows start in different banks

// The only item of a block.
template <typename Tr>
struct OneItem {
  Item item;
  bool left = true;

  __device__ explicit OneItem(const Fp8MatmulParams& p) {
    const Tiles<Tr> tiles(p);
    const int ranks = cluster_size(), rank = cluster_rank();
    const int tile = static_cast<int>(blockIdx.x) / ranks, of_batch = tiles.rows * tiles.columns;
    const int batch = tile / of_batch, within = tile - batch * of_batch;
    const int column = within / tiles.rows, row = within - column * tiles.rows;
    const int64_t blocks = ceil_div(p.k, int64_t{kDepth});
    item = {batch, row * Tr::kRows, column * Tr::kColumns, static_cast<int>(blocks * rank / ranks),
            static_cast<int>(blocks * (rank + 1) / ranks)};
  }
  __device__ bool next() {
    const bool is = left;
    left = false;
    return is;
  }
};

template <typename Tr>
__device__ void math(const Item& item, Ring<Tr>& ring, float* sums) {
  Multiplier<Tr> multiplier(ring);
  const int lane = multiplier.lane, own_row = multiplier.own_row;
  float sum[Tr::kHalves][64] = {};
  for (int left = item.last - item.first; left > 0; --left) {
    multiplier.add(sum, [](int) {});
  }
  named_barrier_sync<Tr::kMathThreads>(kMath);  // all products have read their stages
#pragma unroll
  for (int h = 0; h < Tr::kHalves; ++h) {
#pragma unroll
    for (int g = 0; g < 16; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* const to = sums + (own_row + 64 * h + 8 * r) * kSumStride<Tr> + 8 * g + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = {sum[h][4 * g + 2 * r], sum[h][4 * g + 2 * r + 1]};
      }
    }
  }
}

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};

// Adds up the tile's sums and stores them: this block's part of them, four columns a thread.
template <typename Tr, typename T>
__device__ void reduce(const Fp8MatmulParams& p, const Item& item, const float* sums) {
  constexpr int kChunks = Tr::kColumns / 4;
  const int ranks = cluster_size();
  const int rows = static_cast<int>(min(p.m - item.row, int64_t{Tr::kRows}));
  T* const out = static_cast<T*>(p.out) + (item.batch * p.m + item.row) * p.n + item.column;
  for (int i = cluster_rank() * Tr::kMathThreads + threadIdx.x; i < rows * kChunks;
       i += ranks * Tr::kMathThreads) {
    const int row = i / kChunks, column = i % kChunks * 4;
    const float* const from = sums + row * kSumStride<Tr> + column;
    float4 x = {};
    for (int rank = 0; rank < ranks; ++rank) {
      const float4 y = *reinterpret_cast<const float4*>(cluster_peer(from, rank));
      x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
    }
    const Four<T> rounded = {static_cast<T>(x.x), static_cast<T>(x.y), static_cast<T>(x.z),
                             static_cast<T>(x.w)};
    const int64_t there = p.n - item.column - column;
    T* const to = out + row * p.n + column;
    if (p.n % 4 == 0) {
      if (there > 0) *reinterpret_cast<Four<T>*>(to) = rounded;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < there) to[j] = rounded.x[j];
      }
    }
  }
}

// ---- 32 rows or less ---------------------------------------------------------------------------

// A product has 64 rows of b for its rows and those of a, 16 or 32, for its columns: little is
// padded, and a block's shared memory is for b.
template <int kRows_, int kBlocks_, bool kBRows_>
struct ThinTraits {
  static constexpr int kBlocks = kBlocks_;  // on a SM
  static constexpr bool kBRows = kBRows_;
  static constexpr int kRows = kRows_, kColumns = 64, kRanks = 1;
  static constexpr int kSums = kRows / 2;
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth;
  static constexpr int kStages = 200 * 1024 / kBlocks / kStageBytes;
  static constexpr int kMathThreads = 128, kThreads = kMathThreads + 128;
  static constexpr int kScaleWarps = 1, kFullArrivals = 1 + kScaleWarps + kBRows;
};

template <typename Tr>
inline constexpr bool kIsThin = false;
template <int kRows, int kBlocks, bool kBRows>
inline constexpr bool kIsThin<ThinTraits<kRows, kBlocks, kBRows>> = true;

template <typename Tr>
__device__ void thin_math(const Item& item, Ring<Tr>& ring, float* sums) {
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16 + lane / 4;  // row of b
  const uint64_t b = uniform(k_major_descriptor(smem_address(ring.b[0])));
  const uint64_t a = uniform(k_major_descriptor(smem_address(ring.a[0])));
  RingPlace<Tr::kStages> ahead, at;
  float sum[Tr::kSums] = {};
  const auto begin = [&](float (&d)[Tr::kSums]) {
    mbarrier_wait(&ring.full[ahead.index], ahead.parity);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / 32; ++i) {
      wgmma_e4m3(d, moved(b, ahead.index * Tr::kColumns * kDepth + 32 * i),
                 moved(a, ahead.index * Tr::kRows * kDepth + 32 * i), i > 0);
    }
    wgmma_commit();
    ahead.advance();
  };
  const auto end = [&](float (&d)[Tr::kSums]) {
    wgmma_pin(d);
    float of_b[2] = {1.f, 1.f};  // where they are not by rows, a's are already times b's
    if constexpr (Tr::kBRows) {
#pragma unroll
      for (int r = 0; r < 2; ++r) of_b[r] = ring.b_scale[at.index][b_scale_at(own + 8 * r)];
    }
#pragma unroll
    for (int g = 0; g < Tr::kRows / 8; ++g) {
      const float* const of_a = ring.scale[at.index] + 8 * g + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float scale = of_a[i % 2];
        if constexpr (Tr::kBRows) scale *= of_b[i / 2];
        sum[4 * g + i] = fmaf(scale, d[4 * g + i], sum[4 * g + i]);
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring.free[at.index]);
    at.advance();
  };
  int left = item.last - item.first;
#pragma unroll 1
  for (; left > 1; left -= 2) {
    float d[2][Tr::kSums];
    begin(d[0]);
    begin(d[1]);
    wgmma_wait<1>();
    end(d[0]);
    wgmma_wait<0>();
    end(d[1]);
  }
  if (left > 0) {
    float d[Tr::kSums];
    begin(d);
    wgmma_wait<0>();
    end(d);
  }
  named_barrier_sync<Tr::kMathThreads>(kMath);  // all products have read their stages
#pragma unroll
  for (int i = 0; i < Tr::kSums; ++i) {
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = own + i / 2 % 2 * 8;
    sums[row * kSumStride<Tr> + column] = sum[i];
  }
}

// ---- the kernel --------------------------------------------------------------------------------

// All blocks of the cluster leave their sums, and each adds up a part.
template <typename Tr>
__device__ __forceinline__ void finish(const Fp8MatmulParams& p, const Item& item,
                                       const float* sums) {
  if (cluster_size() > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < Tr::kMathThreads) {  // the others have few registers
    if (p.dtype == DType::kF32) {
      reduce<Tr, float>(p, item, sums);
    } else if (p.dtype == DType::kBF16) {
      reduce<Tr, __nv_bfloat16>(p, item, sums);
    } else {
      reduce<Tr, __half>(p, item, sums);
    }
  }
  if (cluster_size() > 1) cluster_join();  // no block ends before its sums are read
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kBlocks)
    few_kernel(const __grid_constant__ Fp8MatmulParams p, const __grid_constant__ CUtensorMap a_map,
               const __grid_constant__ CUtensorMap b_map) {
  static_assert(Tr::kRows * kSumStride<Tr> * sizeof(float) <= Tr::kStages * Tr::kStageBytes);
  auto& ring = dynamic_shared<Ring<Tr>>();
  auto* const sums = reinterpret_cast<float*>(&ring);
  const OneItem<Tr> one(p);
  if (threadIdx.x == 0) {
    tma_prefetch_map(&a_map);
    tma_prefetch_map(&b_map);
    ring.init();
  }
  __syncthreads();
  if (threadIdx.x < Tr::kMathThreads) {
    if constexpr (kIsThin<Tr>) {
      thin_math<Tr>(one.item, ring, sums);
    } else {
      raise_registers<Tr::kMathRegisters>();
      math<Tr>(one.item, ring, sums);
    }
  } else {
    if constexpr (!kIsThin<Tr>) lower_registers<Tr::kOtherRegisters>();
    produce<Tr>(one, p, a_map, b_map, ring);
  }
  finish<Tr>(p, one.item, sums);
}

}  // namespace jax_dsa::fp8
