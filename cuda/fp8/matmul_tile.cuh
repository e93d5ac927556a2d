// The pipeline of the FP8 matmul, which both of its kernels use (matmul.cuh and matmul_few.cuh).
//
//   out = sum over K blocks j of  a_scale[:, j] * b_scale[:, j] * (A_j B_j^T)
//
// Scale promotion. Tensor cores add e4m3 products with fewer bits than float32 has. So the MMAs
// accumulate over one K block of 128 only. CUDA cores then multiply this sum by the block's scales
// and add it to the result in float32. A warpgroup therefore has two sets of accumulators: those of
// one MMA of 64 rows, and the float32 results of all its rows.
//
// Warps.
//   1 to 3 MMA warpgroups  MMAs and promotion
//   1 producer warpgroup   warp 0 issues TMA loads of the codes; the next kScaleWarps warps load
//                          scales
//
// Shared memory is a ring of stages. A stage holds one K block of a tile of a and of a tile of b
// (128-byte swizzle), with their scales.
#pragma once

#include "common/cluster.cuh"
#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "fp8/matmul.h"
#include "fp8/matmul_schedule.cuh"

namespace jax_dsa::fp8 {

inline constexpr int kOutBoxBytes = 8 * 128;  // a TMA box of the product: 8 rows of 128 bytes

// Template parameters:
//   kWarpgroups    MMA warpgroups, each with kRowBlocks blocks of 64 rows
//   kClusterSize   CTAs of a cluster, which use the same tile of a; each loads a fraction of that
//                  tile and multicasts it to all
template <int kWarpgroups_, int kRowBlocks_, int kClusterSize_>
struct Traits {
  static constexpr int kWarpgroups = kWarpgroups_, kRowBlocks = kRowBlocks_;
  static constexpr int kColumns = kBColumns;  // one 128x128 block of b
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr int kCtasPerSm = kWarpgroups == 1 ? 2 : 1;
  static constexpr int kRows = 64 * kRowBlocks * kWarpgroups;
  static constexpr int kAccumulators = kColumns / 2;  // per thread, for 64 rows
  static constexpr int kStageBytes = (kRows + kColumns) * kBlockK;
  // Boxes per warp. If elements of the product have 16 bits, they hold the warp's whole result.
  static constexpr int kOutBoxes = kWarpgroups == 1 ? 0 : kRowBlocks * kColumns / 32;
  static constexpr int kStages =
      (kWarpgroups == 1 ? 96 * 1024 : 216 * 1024 - 4 * kWarpgroups * kOutBoxes * kOutBoxBytes) /
      kStageBytes;
  static constexpr int kMmaThreads = 128 * kWarpgroups, kThreads = kMmaThreads + 128;
  static constexpr int kMmaRegisters = kWarpgroups == 1   ? 208
                                       : kWarpgroups == 2 ? 224
                                                          : 152,
                       kProducerRegisters = kWarpgroups == 1 ? 40 : 56;
  static_assert(registers_fit(kCtasPerSm, kWarpgroups, kMmaRegisters, kProducerRegisters));
  static constexpr int kScaleWarps = 2;  // warps that load scales
  static constexpr int kFullArrivals = 1 + kScaleWarps;
};

template <typename Tr>
struct alignas(1024) Ring {
  uint8_t a[Tr::kStages][Tr::kRows * kBlockK];
  uint8_t b[Tr::kStages][Tr::kColumns * kBlockK];
  float scale[Tr::kStages][Tr::kRows];  // a's scales times b's
  uint64_t full[Tr::kStages], free[Tr::kStages];

  // Called by one thread. A barrier of the cluster must follow.
  __device__ void init() {
    for (int i = 0; i < Tr::kStages; ++i) {
      mbarrier_init(&full[i], Tr::kFullArrivals);
      mbarrier_init(&free[i], Tr::kMmaThreads / 32 * Tr::kClusterSize);
    }
    mbarrier_init_fence();
  }
};

// ---- producer: codes ----------------------------------------------------------------------------

// Loads one K block of a tile of a. In a cluster, each CTA multicasts its fraction of the rows.
template <int kRows, int kClusterSize>
__device__ __forceinline__ void load_a(uint8_t* to, const CUtensorMap& map, uint64_t* full, int k,
                                       int row, int batch) {
  if constexpr (kClusterSize > 1) {
    constexpr uint16_t kAllCtas = (1 << kClusterSize) - 1;
    const int offset = cluster_rank() * (kRows / kClusterSize);
    tma_load_multicast(to + offset * kBlockK, &map, full, kAllCtas, k, row + offset, batch);
  } else {
    tma_load(to, &map, full, k, row, batch);
  }
}

// Issues the TMA loads. A `TileScheduler` yields this CTA's work tiles: next() sets `work_tile`.
template <typename Tr, typename TileScheduler>
__device__ void produce_operands(TileScheduler scheduler, const CUtensorMap& a_map,
                                 const CUtensorMap& b_map, Ring<Tr>& ring) {
  const bool leader = threadIdx.x % 32 == 0;
  RingPlace<Tr::kStages> at = {0, 1};
  while (scheduler.next()) {
    const WorkTile& work_tile = scheduler.work_tile;
    for (int block = work_tile.k_begin; block < work_tile.k_end; ++block, at.advance()) {
      mbarrier_wait(&ring.free[at.index], at.parity);
      if (!leader) continue;
      uint64_t* const full = &ring.full[at.index];
      mbarrier_arrive_expect(full, Tr::kStageBytes);
      load_a<Tr::kRows, Tr::kClusterSize>(ring.a[at.index], a_map, full, block * kBlockK,
                                          work_tile.row, work_tile.batch);
      tma_load(ring.b[at.index], &b_map, full, block * kBlockK, work_tile.column, work_tile.batch);
    }
  }
}

// ---- producer: scales ---------------------------------------------------------------------------

// Loads kBlocksPerLoad scales at `from`, or zeros if !valid.
template <int kBlocksPerLoad>
__device__ __forceinline__ void load_scales(const float* from, bool valid,
                                            float (&x)[kBlocksPerLoad]) {
  if constexpr (kBlocksPerLoad == 4) {
    const float4 y = valid ? __ldg(reinterpret_cast<const float4*>(from)) : float4{};
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
    static_assert(kBlocksPerLoad == 1);
    x[0] = valid ? __ldg(from) : 0.f;
  }
}

// Loads the scales of both operands and stores their products. `warp` is this warp's number among
// those that load scales. Adjacent lanes have adjacent rows. A lane reads the scales of
// kBlocksPerLoad consecutive K blocks of a row at a time.
template <typename Tr, int kBlocksPerLoad, typename TileScheduler>
__device__ void produce_scales(TileScheduler scheduler, const Fp8MatmulParams& p, Ring<Tr>& ring,
                               int warp) {
  constexpr int kLanes = 32 * Tr::kScaleWarps;
  constexpr int kRowsPerLane = ceil_div(Tr::kRows, kLanes);
  // Prefetching more scales would not fit into registers.
  constexpr bool kPrefetch = kRowsPerLane * kBlocksPerLoad <= 4;
  const int lane = threadIdx.x % 32, own_row = warp * 32 + lane;
  const int blocks = static_cast<int>(ceil_div(p.k, int64_t{kBlockK}));
  RingPlace<Tr::kStages> at = {0, 1};
  while (scheduler.next()) {
    const WorkTile& work_tile = scheduler.work_tile;
    const int64_t row = work_tile.row + own_row;
    const float* const from = p.a_scale + (work_tile.batch * p.m + row) * blocks;
    const int rows_left = static_cast<int>(min(p.m - row, int64_t{kLanes * kRowsPerLane}));
    const float* const tile_scales =
        p.b_scale +
        (work_tile.batch * ceil_div(p.n, int64_t{kBColumns}) + work_tile.column / kBColumns) *
            blocks;
    float x[kRowsPerLane][kBlocksPerLoad], y[kBlocksPerLoad];
    const auto load = [&](int block) {
#pragma unroll
      for (int i = 0; i < kRowsPerLane; ++i) {
        load_scales(from + int64_t{i * kLanes} * blocks + block, i * kLanes < rows_left, x[i]);
      }
      load_scales(tile_scales + block, work_tile.column < p.n, y);
    };
    int block = work_tile.k_begin / kBlocksPerLoad * kBlocksPerLoad;
    if (kPrefetch) load(block);
    for (; block < work_tile.k_end; block += kBlocksPerLoad) {
      if (!kPrefetch) load(block);
      float now[kRowsPerLane][kBlocksPerLoad];
#pragma unroll
      for (int i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
        for (int j = 0; j < kBlocksPerLoad; ++j) now[i][j] = x[i][j] * y[j];
      }
      if (kPrefetch && block + kBlocksPerLoad < work_tile.k_end) {
        load(block + kBlocksPerLoad);
      }
#pragma unroll
      for (int j = 0; j < kBlocksPerLoad; ++j) {
        if (block + j < work_tile.k_begin || block + j >= work_tile.k_end) continue;
        mbarrier_wait(&ring.free[at.index], at.parity);
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
          const int to = own_row + kLanes * i;
          if (Tr::kRows % kLanes != 0 && to >= Tr::kRows) continue;
          ring.scale[at.index][to] = now[i][j];
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&ring.full[at.index]);
        at.advance();
      }
    }
  }
}

template <typename Tr, typename TileScheduler>
__device__ void produce_scales(const TileScheduler& scheduler, const Fp8MatmulParams& p,
                               Ring<Tr>& ring, int warp) {
  const auto address =
      reinterpret_cast<uintptr_t>(p.a_scale) | reinterpret_cast<uintptr_t>(p.b_scale);
  if (ceil_div(p.k, int64_t{kBlockK}) % 4 == 0 && address % 16 == 0) {
    produce_scales<Tr, 4>(scheduler, p, ring, warp);
  } else {
    produce_scales<Tr, 1>(scheduler, p, ring, warp);
  }
}

// Runs the producer warpgroup.
template <typename Tr, typename TileScheduler>
__device__ void produce(const TileScheduler& scheduler, const Fp8MatmulParams& p,
                        const CUtensorMap& a_map, const CUtensorMap& b_map, Ring<Tr>& ring) {
  const int warp = threadIdx.x / 32 - Tr::kMmaThreads / 32;
  if (warp == 0) {
    produce_operands<Tr>(scheduler, a_map, b_map, ring);
  } else if (warp <= Tr::kScaleWarps) {
    produce_scales<Tr>(scheduler, p, ring, warp - 1);
  }
}

// ---- MMA ----------------------------------------------------------------------------------------

// The MMAs and scale promotion of one warpgroup.
template <typename Tr>
struct Multiplier {
  static constexpr int kSteps = kBlockK / 32;

  Ring<Tr>& ring;
  RingPlace<Tr::kStages> at;
  int lane;
  int own_row;    // row in the work tile of this thread's first element
  uint64_t a, b;  // descriptors of stage 0

  __device__ explicit Multiplier(Ring<Tr>& ring) : ring(ring), lane(threadIdx.x % 32) {
    const int first_block = uniform(static_cast<int>(threadIdx.x / 128)) * Tr::kRowBlocks;
    own_row = first_block * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    a = uniform(k_major_descriptor(smem_address(ring.a[0]) + first_block * kBlockBytes));
    b = uniform(k_major_descriptor(smem_address(ring.b[0])));
  }

  // Adds the next stage's product, times its scales. Calls done(h) when row block h is finished.
  template <typename Done>
  __device__ __forceinline__ void accumulate(float (&sum)[Tr::kRowBlocks][Tr::kAccumulators],
                                             const Done& done) {
    mbarrier_wait(&ring.full[at.index], at.parity);
#pragma unroll
    for (int h = 0; h < Tr::kRowBlocks; ++h) {
      const float2 scales = row_scales(h);
      float d[Tr::kAccumulators];
      multiply(at, h, d);
      wgmma_wait<0>();
      wgmma_pin(d);
      promote(d, scales, sum[h]);
      if (h == Tr::kRowBlocks - 1) release();
      done(h);
    }
    at.advance();
  }

  // The same in three calls, for one row block: wait_full waits for stage `place`, start issues the
  // MMAs of that stage, and finish adds the product of stage `at`, which must have completed.
  __device__ __forceinline__ void wait_full(const RingPlace<Tr::kStages>& place) const {
    mbarrier_wait(&ring.full[place.index], place.parity);
  }
  __device__ __forceinline__ void start(RingPlace<Tr::kStages>& place,
                                        float (&d)[Tr::kAccumulators]) const {
    wgmma_forget(d);
    multiply(place, 0, d);
    place.advance();
  }
  __device__ __forceinline__ void finish(float (&d)[Tr::kAccumulators], const float2& scales,
                                         float (&sum)[Tr::kAccumulators]) {
    wgmma_pin(d);
    promote(d, scales, sum);
    release();
    at.advance();
  }

  // Returns the scales of this thread's two rows of row block h.
  __device__ __forceinline__ float2 row_scales(int h) const {
    const float* const scale = ring.scale[at.index] + own_row + 64 * h;
    return {scale[0], scale[8]};
  }

  __device__ __forceinline__ void multiply(const RingPlace<Tr::kStages>& place, int h,
                                           float (&d)[Tr::kAccumulators]) const {
    const uint64_t stage_a = moved(a, place.index * Tr::kRows * kBlockK + h * kBlockBytes);
    const uint64_t stage_b = moved(b, place.index * Tr::kColumns * kBlockK);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wgmma_e4m3(d, moved(stage_a, 32 * i), moved(stage_b, 32 * i), i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release() const {
    __syncwarp();
    if constexpr (Tr::kClusterSize > 1) {
      if (lane < Tr::kClusterSize) mbarrier_arrive_at(&ring.free[at.index], lane);
    } else {
      if (lane == 0) mbarrier_arrive(&ring.free[at.index]);
    }
  }

  // Adds d times its scales. A thread has rows r and r + 8 and, of every eight columns, columns
  // 2 * (lane % 4) and the next one.
  __device__ __forceinline__ void promote(const float (&d)[Tr::kAccumulators], const float2& scales,
                                          float (&sum)[Tr::kAccumulators]) const {
#pragma unroll
    for (int i = 0; i < Tr::kAccumulators; ++i) {
      sum[i] = fmaf(i / 2 % 2 == 0 ? scales.x : scales.y, d[i], sum[i]);
    }
  }
};

}  // namespace jax_dsa::fp8
