// FP8 matmul for few rows, bound by the time to read b. matmul_tile.cuh describes the pipeline.
//
// Tiling. A work tile is 64 or 128 rows by 128 columns, or 16 or 32 rows by 64 columns, of the
// product. K is split among the CTAs of a cluster. At the end each CTA adds up a fraction of the
// work tile by reading the partial sums of all CTAs from their shared memory, in the order of the
// CTA ranks, so that results are deterministic.
//
// Warpgroups.
//   0  MMA
//   1  producer
//
// Two or three CTAs share an SM, so that enough bytes are in flight. At the end the partial sums
// overwrite the stages in shared memory.
#pragma once

#include "fp8/matmul.cuh"
#include "fp8/matmul_tile.cuh"

namespace jax_dsa::fp8 {

enum NamedBarrier { kMmaWarps = 1 };  // 0 is __syncthreads

// Floats between rows of partial sums. The padding puts eight rows into different banks.
template <typename Tr>
inline constexpr int kSumStride = Tr::kColumns + 8;

// The tile scheduler of this kernel: a CTA has one work tile.
template <typename Tr>
struct SingleTileScheduler {
  WorkTile work_tile;
  bool pending = true;

  __device__ explicit SingleTileScheduler(const Fp8MatmulParams& p) {
    const Tiles<Tr> tiles(p);
    const int ranks = cluster_size(), rank = cluster_rank();
    const int tile = static_cast<int>(blockIdx.x) / ranks;
    const int tiles_per_batch = tiles.rows * tiles.columns;
    const int batch = tile / tiles_per_batch, within = tile - batch * tiles_per_batch;
    const int column = within / tiles.rows, row = within - column * tiles.rows;
    const int64_t blocks = ceil_div(p.k, int64_t{kBlockK});
    work_tile = {batch, row * Tr::kRows, column * Tr::kColumns,
                 static_cast<int>(blocks * rank / ranks),
                 static_cast<int>(blocks * (rank + 1) / ranks)};
  }
  __device__ bool next() {
    const bool has_next = pending;
    pending = false;
    return has_next;
  }
};

// MMA loop for 64 or 128 rows. Leaves the partial sums in `sums`.
template <typename Tr>
__device__ void consume_split(const WorkTile& work_tile, Ring<Tr>& ring, float* sums) {
  Multiplier<Tr> multiplier(ring);
  const int lane = multiplier.lane, own_row = multiplier.own_row;
  float sum[Tr::kRowBlocks][64] = {};
  for (int left = work_tile.k_end - work_tile.k_begin; left > 0; --left) {
    multiplier.accumulate(sum, [](int) {});
  }
  named_barrier_sync<Tr::kMmaThreads>(kMmaWarps);  // all MMAs have read their stages
#pragma unroll
  for (int h = 0; h < Tr::kRowBlocks; ++h) {
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

// Adds up the splits of this CTA's fraction of the work tile and stores the result. A thread
// processes four columns at a time.
template <typename Tr, typename T>
__device__ void reduce(const Fp8MatmulParams& p, const WorkTile& work_tile, const float* sums) {
  constexpr int kChunks = Tr::kColumns / 4;
  const int ranks = cluster_size();
  const int rows = static_cast<int>(min(p.m - work_tile.row, int64_t{Tr::kRows}));
  T* const out =
      static_cast<T*>(p.out) + (work_tile.batch * p.m + work_tile.row) * p.n + work_tile.column;
  for (int i = cluster_rank() * Tr::kMmaThreads + threadIdx.x; i < rows * kChunks;
       i += ranks * Tr::kMmaThreads) {
    const int row = i / kChunks, column = i % kChunks * 4;
    const float* const from = sums + row * kSumStride<Tr> + column;
    float4 x = {};
    for (int rank = 0; rank < ranks; ++rank) {
      const float4 y = *reinterpret_cast<const float4*>(cluster_peer(from, rank));
      x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
    }
    const Vector4<T> rounded = {static_cast<T>(x.x), static_cast<T>(x.y), static_cast<T>(x.z),
                                static_cast<T>(x.w)};
    const int64_t columns_left = p.n - work_tile.column - column;
    T* const to = out + row * p.n + column;
    if (p.n % 4 == 0) {
      if (columns_left > 0) *reinterpret_cast<Vector4<T>*>(to) = rounded;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < columns_left) to[j] = rounded.x[j];
      }
    }
  }
}

// ---- 32 rows or fewer --------------------------------------------------------------------------

// The operands of the MMA are swapped: M is 64 rows of b, and N is the 16 or 32 rows of a. So few
// rows are padding, and most of the shared memory is for b.
template <int kRows_, int kCtasPerSm_>
struct ThinTraits {
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr int kRows = kRows_, kColumns = 64, kClusterSize = 1;
  static constexpr int kAccumulators = kRows / 2;
  static constexpr int kStageBytes = (kRows + kColumns) * kBlockK;
  static constexpr int kStages = 200 * 1024 / kCtasPerSm / kStageBytes;
  static constexpr int kMmaThreads = 128, kThreads = kMmaThreads + 128;
  static constexpr int kScaleWarps = 1, kFullArrivals = 1 + kScaleWarps;
};

template <typename Tr>
inline constexpr bool kIsThin = false;
template <int kRows, int kCtasPerSm>
inline constexpr bool kIsThin<ThinTraits<kRows, kCtasPerSm>> = true;

// MMA loop for 16 or 32 rows, two stages at a time. Leaves the partial sums in `sums`.
template <typename Tr>
__device__ void consume_thin(const WorkTile& work_tile, Ring<Tr>& ring, float* sums) {
  const int lane = threadIdx.x % 32, own_row = threadIdx.x / 32 * 16 + lane / 4;  // of b
  const uint64_t b = uniform(k_major_descriptor(smem_address(ring.b[0])));
  const uint64_t a = uniform(k_major_descriptor(smem_address(ring.a[0])));
  RingPlace<Tr::kStages> ahead, at;
  float sum[Tr::kAccumulators] = {};
  const auto start = [&](float (&d)[Tr::kAccumulators]) {
    mbarrier_wait(&ring.full[ahead.index], ahead.parity);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockK / 32; ++i) {
      wgmma_e4m3(d, moved(b, ahead.index * Tr::kColumns * kBlockK + 32 * i),
                 moved(a, ahead.index * Tr::kRows * kBlockK + 32 * i), i > 0);
    }
    wgmma_commit();
    ahead.advance();
  };
  const auto finish = [&](float (&d)[Tr::kAccumulators]) {
    wgmma_pin(d);
#pragma unroll
    for (int g = 0; g < Tr::kRows / 8; ++g) {
      const float* const scales = ring.scale[at.index] + 8 * g + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[4 * g + i] = fmaf(scales[i % 2], d[4 * g + i], sum[4 * g + i]);
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring.free[at.index]);
    at.advance();
  };
  int left = work_tile.k_end - work_tile.k_begin;
#pragma unroll 1
  for (; left > 1; left -= 2) {
    float d[2][Tr::kAccumulators];
    start(d[0]);
    start(d[1]);
    wgmma_wait<1>();
    finish(d[0]);
    wgmma_wait<0>();
    finish(d[1]);
  }
  if (left > 0) {
    float d[Tr::kAccumulators];
    start(d);
    wgmma_wait<0>();
    finish(d);
  }
  named_barrier_sync<Tr::kMmaThreads>(kMmaWarps);  // all MMAs have read their stages
#pragma unroll
  for (int i = 0; i < Tr::kAccumulators; ++i) {
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = own_row + i / 2 % 2 * 8;
    sums[row * kSumStride<Tr> + column] = sum[i];
  }
}

// ---- the kernel --------------------------------------------------------------------------------

// Waits until all CTAs of the cluster have written their partial sums, and adds up this CTA's
// fraction.
template <typename Tr>
__device__ __forceinline__ void store_results(const Fp8MatmulParams& p, const WorkTile& work_tile,
                                              const float* sums) {
  if (cluster_size() > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < Tr::kMmaThreads) {  // the producer warpgroup has too few registers
    if (p.dtype == DType::kF32) {
      reduce<Tr, float>(p, work_tile, sums);
    } else if (p.dtype == DType::kBF16) {
      reduce<Tr, __nv_bfloat16>(p, work_tile, sums);
    } else {
      reduce<Tr, __half>(p, work_tile, sums);
    }
  }
  if (cluster_size() > 1) cluster_join();  // no CTA may exit before the others have read its sums
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtasPerSm)
    few_kernel(const __grid_constant__ Fp8MatmulParams p, const __grid_constant__ CUtensorMap a_map,
               const __grid_constant__ CUtensorMap b_map) {
  static_assert(Tr::kRows * kSumStride<Tr> * sizeof(float) <= Tr::kStages * Tr::kStageBytes);
  auto& ring = dynamic_shared<Ring<Tr>>();
  auto* const sums = reinterpret_cast<float*>(&ring);
  const SingleTileScheduler<Tr> scheduler(p);
  if (threadIdx.x == 0) {
    tma_prefetch_map(&a_map);
    tma_prefetch_map(&b_map);
    ring.init();
  }
  __syncthreads();
  if (threadIdx.x < Tr::kMmaThreads) {
    if constexpr (kIsThin<Tr>) {
      consume_thin<Tr>(scheduler.work_tile, ring, sums);
    } else {
      raise_registers<Tr::kMmaRegisters>();
      consume_split<Tr>(scheduler.work_tile, ring, sums);
    }
  } else {
    if constexpr (!kIsThin<Tr>) lower_registers<Tr::kProducerRegisters>();
    produce<Tr>(scheduler, p, a_map, b_map, ring);
  }
  store_results<Tr>(p, scheduler.work_tile, sums);
}

}  // namespace jax_dsa::fp8
