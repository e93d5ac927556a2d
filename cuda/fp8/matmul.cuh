// FP8 matmul for many rows. matmul_tile.cuh describes the pipeline.
//
// Tiling. A work tile is 256x128, 192x128 or 128x128 elements of the product and all of K.
// Persistent CTAs walk over the work tiles with a static tile scheduler. The two CTAs of a cluster
// have work tiles side by side and share their tile of a.
//
// Warpgroups.
//   256 or 128 rows: 0, 1     MMA, half of the rows each, 64 rows at a time
//                    2        producer
//   192 rows:        0, 1, 2  MMA, 64 rows each
//                    3        producer
//
// Shared memory: 3 stages of 48 KiB, 4 of 40 KiB or 5 of 32 KiB for 256, 192 or 128 rows, with
// their scales, and a work tile of the product in 16 bits. TMA stores the product while the next
// work tile is computed.
#pragma once

#include "fp8/matmul_schedule.cuh"
#include "fp8/matmul_tile.cuh"
#include "fp8/pack.cuh"

namespace jax_dsa::fp8 {

// Returns whether TMA can store the product, whose rows must be multiples of 16 bytes.
__host__ __device__ inline bool stored_by_tma(const Fp8MatmulParams& p) {
  const uint64_t row_bytes = p.n * (p.dtype == DType::kF32 ? 4 : 2);
  return (row_bytes | reinterpret_cast<uintptr_t>(p.out)) % 16 == 0;
}

template <typename Tr>
struct Shared {
  Ring<Tr> ring;
  alignas(1024) uint8_t boxes[Tr::kMmaThreads / 32][Tr::kOutBoxes][kOutBoxBytes];
};

// Writes an MMA warp's results to global memory. The warp puts them into boxes of 8 rows of 128
// bytes in shared memory. TMA stores these boxes while the warp goes on with the next MMAs. If TMA
// cannot store the product, the warp copies the boxes itself.
template <typename Tr>
struct Epilogue {
  static constexpr int kBoxesPerStore = Tr::kOutBoxes / Tr::kRowBlocks;  // boxes of one bulk group

  const Fp8MatmulParams& p;
  const CUtensorMap& map;
  uint8_t (&boxes)[Tr::kOutBoxes][kOutBoxBytes];
  const int lane = threadIdx.x % 32;
  int next = 0;  // the set of boxes to fill next

  // Stores 16 rows from `row` on, given as the accumulators of an MMA.
  template <typename T>
  __device__ __forceinline__ void store(const WorkTile& work_tile, int row,
                                        const float (&sum)[Tr::kAccumulators]) {
    constexpr int kBoxColumns = 128 / sizeof(T), kBoxesAcross = Tr::kColumns / kBoxColumns;
    constexpr int kBoxesDown = kBoxesPerStore / kBoxesAcross;  // in units of 8 rows
    static_assert(kBoxesDown * kBoxesAcross == kBoxesPerStore);
#pragma unroll
    for (int first = 0; first < 2; first += kBoxesDown) {
      uint8_t (*const set)[kOutBoxBytes] = boxes + next * kBoxesPerStore;
      next = next + 1 < Tr::kRowBlocks ? next + 1 : 0;
      if (lane == 0) bulk_wait_read<Tr::kRowBlocks - 1>();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kBoxesPerStore; ++i) {
        fill<T>(set[i], sum + i % kBoxesAcross * kBoxColumns / 2 + 2 * (first + i / kBoxesAcross));
      }
      const auto for_box = [&](int i, auto f) {
        f(work_tile.batch, row + 8 * (first + i / kBoxesAcross),
          work_tile.column + i % kBoxesAcross * kBoxColumns, set[i]);
      };
      if (stored_by_tma(p)) {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
#pragma unroll
          for (int i = 0; i < kBoxesPerStore; ++i) {
            for_box(i, [&](int batch, int y, int x, uint8_t* box) {
              tma_store(&map, box, x, y, batch);
            });
          }
          bulk_commit();
        }
      } else {
        __syncwarp();
        for (int i = 0; i < kBoxesPerStore; ++i) {
          for_box(i,
                  [&](int batch, int y, int x, uint8_t* box) { store_box<T>(batch, y, x, box); });
        }
        __syncwarp();
      }
    }
  }

  // Fills a box with the warp's accumulators. Elements 4 i and 4 i + 1 of `x` belong to this lane's
  // row, in columns 8 i to 8 i + 7 of the box.
  template <typename T>
  __device__ __forceinline__ void fill(uint8_t* box, const float* x) const {
    const auto at = [](int row, int chunk) { return row * 128 + (chunk ^ row) * 16; };
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int to = at(lane / 4, 2 * g + lane % 4 / 2) + lane % 2 * 8;
        *reinterpret_cast<float2*>(box + to) = {x[4 * g], x[4 * g + 1]};
      }
    } else {
#pragma unroll
      for (int g = 0; g < 8; g += 4) {  // four 8x8 matrices
        store_matrix_x4(smem_address(box) + at(lane % 8, g + lane / 8),
                        pack<T>(x[4 * g], x[4 * g + 1]), pack<T>(x[4 * g + 4], x[4 * g + 5]),
                        pack<T>(x[4 * g + 8], x[4 * g + 9]), pack<T>(x[4 * g + 12], x[4 * g + 13]));
      }
    }
  }

  // Copies a box to global memory, for products that TMA cannot store.
  template <typename T>
  __device__ __forceinline__ void store_box(int batch, int row, int column,
                                            const uint8_t* box) const {
    constexpr int kBoxColumns = 128 / sizeof(T), kChunkColumns = 16 / sizeof(T);
    T* const out = static_cast<T*>(p.out) + (batch * p.m + row) * p.n + column;
    for (int r = 0; r < 8 && row + r < p.m; ++r) {
#pragma unroll
      for (int c = lane; c < kBoxColumns; c += 32) {
        const auto* chunk = box + r * 128 + (c / kChunkColumns ^ r) * 16;
        if (column + c < p.n) {
          out[r * p.n + c] = reinterpret_cast<const T*>(chunk)[c % kChunkColumns];
        }
      }
    }
  }

  // Waits until TMA has read all boxes.
  __device__ __forceinline__ void drain() const {
    if (lane == 0) bulk_wait_read<0>();
  }
};

// Stores a warpgroup's results for 64 rows.
template <typename Tr>
__device__ __forceinline__ void store_rows(Epilogue<Tr>& epilogue, const WorkTile& work_tile,
                                           int row, const float (&sum)[Tr::kAccumulators]) {
  if (epilogue.p.dtype == DType::kF32) {
    epilogue.template store<float>(work_tile, row, sum);
  } else if (epilogue.p.dtype == DType::kBF16) {
    epilogue.template store<__nv_bfloat16>(work_tile, row, sum);
  } else {
    epilogue.template store<__half>(work_tile, row, sum);
  }
}

// MMA loop for work tiles of 256 rows, where a warpgroup has two row blocks and processes one after
// the other, and of 192 rows, where it has one.
template <typename Tr>
__device__ void consume(TileScheduler<Tr> scheduler, Multiplier<Tr> multiplier,
                        Epilogue<Tr> epilogue) {
  const int own_row = multiplier.own_row - multiplier.lane / 4;
  while (scheduler.next()) {
    float sum[Tr::kRowBlocks][Tr::kAccumulators] = {};
#pragma unroll 1
    for (int left = scheduler.work_tile.k_end; left > 1; --left) {
      multiplier.accumulate(sum, [](int) {});
    }
    multiplier.accumulate(sum, [&](int h) {
      store_rows(epilogue, scheduler.work_tile, scheduler.work_tile.row + own_row + 64 * h, sum[h]);
    });
  }
  epilogue.drain();
}

// MMA loop for work tiles of 128 rows. There are registers for two products, so the MMAs of the
// next stage overlap with the promotion of the current one.
template <typename Tr>
__device__ void consume_overlapped(TileScheduler<Tr> scheduler, Multiplier<Tr> multiplier,
                                   Epilogue<Tr> epilogue) {
  const int own_row = multiplier.own_row - multiplier.lane / 4;
  RingPlace<Tr::kStages> ahead;
  while (scheduler.next()) {
    float d[2][Tr::kAccumulators], sum[Tr::kAccumulators] = {};
    const auto step = [&](float (&now)[Tr::kAccumulators], float (&next)[Tr::kAccumulators]) {
      const float2 scales = multiplier.row_scales(0);
      multiplier.wait_full(ahead);
      multiplier.start(ahead, next);
      wgmma_wait<1>();
      multiplier.finish(now, scales, sum);
    };
    const auto last = [&](float (&now)[Tr::kAccumulators]) {
      const float2 scales = multiplier.row_scales(0);
      wgmma_wait<0>();
      multiplier.finish(now, scales, sum);
    };
    multiplier.wait_full(ahead);
    multiplier.start(ahead, d[0]);
    int left = scheduler.work_tile.k_end;
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
    store_rows(epilogue, scheduler.work_tile, scheduler.work_tile.row + own_row, sum);
  }
  epilogue.drain();
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtasPerSm)
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
  if (Tr::kClusterSize > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < Tr::kMmaThreads) {
    raise_registers<Tr::kMmaRegisters>();
    const Multiplier<Tr> multiplier(shared.ring);
    const Epilogue<Tr> epilogue = {p, out_map, shared.boxes[threadIdx.x / 32]};
    if constexpr (Tr::kRowBlocks > 1 || Tr::kWarpgroups > 2) {
      consume<Tr>(TileScheduler<Tr>(p), multiplier, epilogue);
    } else {
      consume_overlapped<Tr>(TileScheduler<Tr>(p), multiplier, epilogue);
    }
  } else {
    lower_registers<Tr::kProducerRegisters>();
    produce<Tr>(TileScheduler<Tr>(p), p, a_map, b_map, shared.ring);
  }
  if (Tr::kClusterSize > 1)
    cluster_join();  // the other CTA still writes to this one's shared memory
}

}  // namespace jax_dsa::fp8
