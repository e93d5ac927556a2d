// What the FP8 matmul's two kernels share: a ring of stages in shared memory, each with a block of
// 128 of K, and the three roles around it: one warp copies codes (TMA), two or three bring scales,
// one to three warpgroups multiply.
//
// A tensor core adds e4m3 products in less than f32, so the sum over a block is multiplied by its
// scales and added in the FP32 units ("promoted"). A warpgroup has two sets of accumulators: those
// of one product of 64 rows, and the sums of all its rows.
#pragma once

#include "common/cluster.cuh"
#include "common/limits.h"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"
#include "fp8/matmul.h"

namespace jax_dsa::fp8 {

inline constexpr int kDepth = 128;     // elements of K in a stage: a block, and a row of 128 bytes
inline constexpr int kBColumns = 128;  // that a block of b's scales has, unless they are by rows
inline constexpr int kPieceBytes = 8 * 128;  // of the product

// kGroups: warpgroups that multiply, each kHalves times 64 rows. kRanks: blocks of a cluster, which
// share a: each copies a part of it to all. kBRows: blocks of b are 1x128.
template <int kGroups_, int kHalves_, int kRanks_, bool kBRows_>
struct Traits {
  static constexpr int kGroups = kGroups_, kHalves = kHalves_;
  static constexpr int kColumns = kBColumns;  // of a tile: one block of b
  static constexpr int kRanks = kRanks_;
  static constexpr bool kBRows = kBRows_;
  static constexpr int kBlocks = kGroups == 1 ? 2 : 1;  // on a SM
  static constexpr int kRows = 64 * kHalves * kGroups;
  static constexpr int kSums = kColumns / 2;  // of 64 rows, in a thread
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth;
  // Of the product, in a warp: all of a tile, if that is in 16 bits.
  static constexpr int kPieces = kGroups == 1 ? 0 : kHalves * kColumns / 32;
  static constexpr int kStages =
      (kGroups == 1 ? 96 * 1024 : 216 * 1024 - 4 * kGroups * kPieces * kPieceBytes) / kStageBytes;
  static constexpr int kMathThreads = 128 * kGroups, kThreads = kMathThreads + 128;
  static constexpr int kMathRegisters = kGroups == 1   ? 208
                                        : kGroups == 2 ? 224
                                                       : 152,
                       kOtherRegisters = kGroups == 1 ? 40 : 56;
  static_assert(registers_fit(kBlocks, kGroups, kMathRegisters, kOtherRegisters));
  static constexpr int kScaleWarps = 2;  // those that bring scales of a; another brings b's
  static constexpr int kFullArrivals = 1 + kScaleWarps + kBRows;
};

// Where scales of b are that are by rows: a multiplying thread's four of 16 columns side by side.
__device__ __forceinline__ int b_scale_at(int column) {
  return column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2;
}

template <typename Tr>
struct alignas(1024) Ring {
  uint8_t a[Tr::kStages][Tr::kRows * kDepth];
  uint8_t b[Tr::kStages][Tr::kColumns * kDepth];
  float scale[Tr::kStages][Tr::kRows];  // of a's rows; unless kBRows times that of b's block
  alignas(16) float b_scale[Tr::kStages][Tr::kBRows ? Tr::kColumns : 1];  // by b_scale_at
  uint64_t full[Tr::kStages], free[Tr::kStages];

  // By one thread, before a barrier of the cluster.
  __device__ void init() {
    for (int i = 0; i < Tr::kStages; ++i) {
      mbarrier_init(&full[i], Tr::kFullArrivals);
      mbarrier_init(&free[i], Tr::kMathThreads / 32 * Tr::kRanks);
    }
    mbarrier_init_fence();
  }
};

// A tile of the product, or some of the blocks of K of one.
struct Item {
  int batch;
  int row, column;  // the first
  int first, last;  // blocks
};

// ---- copies ------------------------------------------------------------------------------------

// Rows of a to a stage. Blocks that share them bring a part each, to all.
template <int kRows, int kRanks>
__device__ __forceinline__ void copy_rows(uint8_t* to, const CUtensorMap& map, uint64_t* full,
                                          int depth, int row, int batch) {
  if constexpr (kRanks > 1) {
    constexpr uint16_t kAll = (1 << kRanks) - 1;
    const int part = cluster_rank() * (kRows / kRanks);
    tma_load_multicast(to + part * kDepth, &map, full, kAll, depth, row + part, batch);
  } else {
    tma_load(to, &map, full, depth, row, batch);
  }
}

// `Walk` has the items of this block, one after the other: next() goes to the next `item`.
template <typename Tr, typename Walk>
__device__ void copy(Walk walk, const CUtensorMap& a_map, const CUtensorMap& b_map,
                     Ring<Tr>& ring) {
  const bool leader = threadIdx.x % 32 == 0;
  RingPlace<Tr::kStages> at = {0, 1};
  while (walk.next()) {
    const Item& item = walk.item;
    for (int block = item.first; block < item.last; ++block, at.advance()) {
      mbarrier_wait(&ring.free[at.index], at.parity);
      if (!leader) continue;
      uint64_t* const full = &ring.full[at.index];
      mbarrier_arrive_expect(full, Tr::kStageBytes);
      copy_rows<Tr::kRows, Tr::kRanks>(ring.a[at.index], a_map, full, block * kDepth, item.row,
                                       item.batch);
      tma_load(ring.b[at.index], &b_map, full, block * kDepth, item.column, item.batch);
    }
  }
}

// ---- scales ------------------------------------------------------------------------------------

// kCount scales from `from` on, zeros if !valid.
template <int kCount>
__device__ __forceinline__ void load_scales(const float* from, bool valid, float (&x)[kCount]) {
  if constexpr (kCount == 4) {
    const float4 y = valid ? __ldg(reinterpret_cast<const float4*>(from)) : float4{};
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
    static_assert(kCount == 1);
    x[0] = valid ? __ldg(from) : 0.f;
  }
}

// By the warps beside the copying one, of which `warp` is the number among those of one operand: kB
// says whose. Lanes have rows side by side, and read kCount blocks of a row at a time, whose scales
// lie side by side, too.
template <typename Tr, bool kB, int kCount, typename Walk>
__device__ void bring_scales(Walk walk, const Fp8MatmulParams& p, Ring<Tr>& ring, int warp) {
  constexpr int kLanes = 32 * (kB ? 1 : Tr::kScaleWarps);
  constexpr int kAll = kB ? Tr::kColumns : Tr::kRows, kOwn = ceil_div(kAll, kLanes);
  constexpr bool kAhead = kOwn * kCount <= 4;  // more would not fit into the registers
  const int lane = threadIdx.x % 32, own = warp * 32 + lane;
  const int blocks = static_cast<int>(ceil_div(p.k, int64_t{kDepth}));
  const int64_t rows = kB ? p.n : p.m;
  RingPlace<Tr::kStages> at = {0, 1};
  while (walk.next()) {
    const Item& item = walk.item;
    const int64_t row = (kB ? item.column : item.row) + own;
    const float* const from = (kB ? p.b_scale : p.a_scale) + (item.batch * rows + row) * blocks;
    const int there = static_cast<int>(min(rows - row, int64_t{kLanes * kOwn}));
    const float* const of_tile =
        p.b_scale +
        (item.batch * ceil_div(p.n, int64_t{kBColumns}) + item.column / kBColumns) * blocks;
    float x[kOwn][kCount], y[kCount];
    const auto load = [&](int block) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        load_scales(from + int64_t{i * kLanes} * blocks + block, i * kLanes < there, x[i]);
      }
      if constexpr (!Tr::kBRows) load_scales(of_tile + block, item.column < p.n, y);
    };
    int block = item.first / kCount * kCount;
    if (kAhead) load(block);
    for (; block < item.last; block += kCount) {
      if (!kAhead) load(block);
      float now[kOwn][kCount];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) now[i][j] = Tr::kBRows ? x[i][j] : x[i][j] * y[j];
      }
      if (kAhead && block + kCount < item.last) load(block + kCount);  // while these are handed out
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (block + j < item.first || block + j >= item.last) continue;
        mbarrier_wait(&ring.free[at.index], at.parity);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const int to = own + kLanes * i;
          if (kAll % kLanes != 0 && to >= kAll) continue;
          if constexpr (kB) {
            ring.b_scale[at.index][b_scale_at(to)] = now[i][j];
          } else {
            ring.scale[at.index][to] = now[i][j];
          }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&ring.full[at.index]);
        at.advance();
      }
    }
  }
}

template <typename Tr, bool kB, typename Walk>
__device__ void bring_scales(const Walk& walk, const Fp8MatmulParams& p, Ring<Tr>& ring, int warp) {
  const auto address = reinterpret_cast<uintptr_t>(kB ? p.b_scale : p.a_scale) |
                       reinterpret_cast<uintptr_t>(p.b_scale);
  if (ceil_div(p.k, int64_t{kDepth}) % 4 == 0 && address % 16 == 0) {
    bring_scales<Tr, kB, 4>(walk, p, ring, warp);
  } else {
    bring_scales<Tr, kB, 1>(walk, p, ring, warp);
  }
}

// What the last warpgroup does.
template <typename Tr, typename Walk>
__device__ void produce(const Walk& walk, const Fp8MatmulParams& p, const CUtensorMap& a_map,
                        const CUtensorMap& b_map, Ring<Tr>& ring) {
  const int warp = threadIdx.x / 32 - Tr::kMathThreads / 32;
  if (warp == 0) {
    copy<Tr>(walk, a_map, b_map, ring);
  } else if (warp <= Tr::kScaleWarps) {
    bring_scales<Tr, false>(walk, p, ring, warp - 1);
  } else if (Tr::kBRows && warp == Tr::kScaleWarps + 1) {
    bring_scales<Tr, true>(walk, p, ring, 0);
  }
}

// ---- products ----------------------------------------------------------------------------------

// A multiplying warpgroup's view of the ring.
template <typename Tr>
struct Multiplier {
  static constexpr int kSteps = kDepth / 32;

  Ring<Tr>& ring;
  RingPlace<Tr::kStages> at;
  int lane;
  int own_row;    // in the tile, of this thread's first element
  uint64_t a, b;  // descriptors, of stage 0

  __device__ explicit Multiplier(Ring<Tr>& ring) : ring(ring), lane(threadIdx.x % 32) {
    const int first = uniform(static_cast<int>(threadIdx.x / 128)) * Tr::kHalves;  // of 64 rows
    own_row = first * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    a = uniform(k_major_descriptor(smem_address(ring.a[0]) + first * kBlockBytes));
    b = uniform(k_major_descriptor(smem_address(ring.b[0])));
  }

  // Adds the next stage's product, times its scales, and calls done(h) when that of half h is in.
  template <typename Done>
  __device__ __forceinline__ void add(float (&sum)[Tr::kHalves][Tr::kSums], const Done& done) {
    mbarrier_wait(&ring.full[at.index], at.parity);
#pragma unroll
    for (int h = 0; h < Tr::kHalves; ++h) {
      const float2 own = scales(h);
      float d[Tr::kSums];
      multiply(at, h, d);
      wgmma_wait<0>();
      wgmma_pin(d);
      promote(d, own, sum[h]);
      if (h == Tr::kHalves - 1) release();
      done(h);
    }
    at.advance();
  }

  // The same in three steps: waits for stage `place`, begins its product, and adds that of `at`.
  __device__ __forceinline__ void await(const RingPlace<Tr::kStages>& place) const {
    mbarrier_wait(&ring.full[place.index], place.parity);
  }
  __device__ __forceinline__ void begin(RingPlace<Tr::kStages>& place,
                                        float (&d)[Tr::kSums]) const {
    wgmma_forget(d);
    multiply(place, 0, d);
    place.advance();
  }
  __device__ __forceinline__ void end(float (&d)[Tr::kSums], const float2& own,
                                      float (&sum)[Tr::kSums]) {
    wgmma_pin(d);
    promote(d, own, sum);
    release();
    at.advance();
  }

  // Of this thread's two rows of half h.
  __device__ __forceinline__ float2 scales(int h) const {
    const float* const scale = ring.scale[at.index] + own_row + 64 * h;
    return {scale[0], scale[8]};
  }

  __device__ __forceinline__ void multiply(const RingPlace<Tr::kStages>& place, int h,
                                           float (&d)[Tr::kSums]) const {
    const uint64_t stage_a = moved(a, place.index * Tr::kRows * kDepth + h * kBlockBytes);
    const uint64_t stage_b = moved(b, place.index * Tr::kColumns * kDepth);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wgmma_e4m3(d, moved(stage_a, 32 * i), moved(stage_b, 32 * i), i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release() const {
    __syncwarp();
    if constexpr (Tr::kRanks > 1) {
      if (lane < Tr::kRanks) mbarrier_arrive_at(&ring.free[at.index], lane);
    } else {
      if (lane == 0) mbarrier_arrive(&ring.free[at.index]);
    }
  }

  // A thread's accumulators are rows r and r + 8, columns 2 * (lane % 4) + {0, 1} of each eight.
  __device__ __forceinline__ void promote(const float (&d)[Tr::kSums], const float2& own,
                                          float (&sum)[Tr::kSums]) const {
#pragma unroll
    for (int g = 0; g < Tr::kColumns / 16; ++g) {
      uint32_t of_b[4];
      if constexpr (Tr::kBRows) {
        load_shared_16(smem_address(ring.b_scale[at.index]) + 64 * g + lane % 4 * 16, of_b);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float scale = i / 2 % 2 == 0 ? own.x : own.y;
        if constexpr (Tr::kBRows) scale *= __uint_as_float(of_b[i / 4 * 2 + i % 2]);
        sum[8 * g + i] = fmaf(scale, d[8 * g + i], sum[8 * g + i]);
      }
    }
  }
};

}  // namespace jax_dsa::fp8
