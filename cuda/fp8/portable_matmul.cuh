// FP8 matmul with instructions of sm_80.
//
//   out = sum over K blocks j of  a_scale[:, j] * b_scale[:, j] * (A_j B_j^T)
//
// Tiling. A work tile is 128x128 elements of the product, or 32x64 if there are few rows or too few
// work tiles for the SMs, and all of K. Persistent CTAs walk over the work tiles with the static
// tile scheduler of the Hopper kernel. A warp has 32 rows and 64 or 16 columns of a work tile.
//
// Pipeline. A stage holds one K block of 128 of both operands and its scales. cp.async fills the
// stages, also for the next work tile, while the warps multiply. Each K block has one barrier.
//
// Products. A warp holds its rows of a in registers, and multiplies them with 16 rows of b at a
// time over the whole K block. The accumulators of such a product are then multiplied by the
// scales and added to the result in float32, as matmul_tile.cuh explains. The next product needs
// neither these accumulators nor the FP32 units, so promotion and MMAs overlap. GPUs without an
// e4m3 mma.sync convert the codes to f16, which is exact.
//
// Shared memory, on every GPU: 3 stages of 32.5 KiB for one CTA per SM, or of 12.1 KiB for two.
#pragma once

#include "common/mma_tile.cuh"
#include "fp8/matmul.h"
#include "fp8/matmul_schedule.cuh"
#include "fp8/pack.cuh"

namespace jax_dsa::fp8 {

template <int kRows_, int kColumns_, int kWarpsDown_, int kWarpsAcross_, int kCtasPerSm_>
struct PortableTraits {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kClusterSize = 1;
  static constexpr int kWarpsAcross = kWarpsAcross_, kCtasPerSm = kCtasPerSm_, kStages = 3;
  static constexpr int kThreads = 32 * kWarpsDown_ * kWarpsAcross_;
  static constexpr int kWarpRows = kRows / kWarpsDown_, kWarpColumns = kColumns / kWarpsAcross_;
  static constexpr int kM = kWarpRows / 16, kN = kWarpColumns / 16;
  static_assert(kRows < kThreads);           // a thread loads at most one scale
  static_assert(kBColumns % kColumns == 0);  // a work tile has one scale of b per K block
};

inline constexpr int kMmaSteps = kBlockK / 32;  // of a K block

// Registers that hold 16 rows of a for one step.
inline constexpr int kStepWords = kHasE4m3Mma ? 4 : 8;

template <typename Tr>
struct alignas(128) PortableShared {
  // See mma_tile.cuh for the layout of a tile.
  uint8_t a[Tr::kStages][Tr::kRows * kBlockK];
  uint8_t b[Tr::kStages][Tr::kColumns * kBlockK];
  float a_scale[Tr::kStages][Tr::kRows], b_scale[Tr::kStages];
};

// Loads the K blocks of this CTA's work tiles, one after the other.
template <typename Tr>
struct Loader {
  const Fp8MatmulParams& p;
  PortableShared<Tr>& shared;
  TileScheduler<Tr> scheduler;
  int block = 0;
  bool more;

  __device__ Loader(const Fp8MatmulParams& p, PortableShared<Tr>& shared)
      : p(p), shared(shared), scheduler(p), more(scheduler.next() && p.k > 0) {}

  // Issues the copies of the next K block, if there is one, as a group of cp.async.
  __device__ __forceinline__ void load(int stage) {
    if (more) {
      const WorkTile& tile = scheduler.work_tile;
      load_codes<Tr::kRows>(smem_address(shared.a[stage]), p.a, p.m, tile.row);
      load_codes<Tr::kColumns>(smem_address(shared.b[stage]), p.b, p.n, tile.column);
      load_scale(stage);
      if (++block == tile.k_end) {
        more = scheduler.next();
        block = 0;
      }
    }
    cp_async_commit();
  }

 private:
  // Rows and chunks of 16 bytes that do not exist become zero.
  template <int kTileRows>
  __device__ __forceinline__ void load_codes(uint32_t to, const uint8_t* codes, int64_t rows,
                                             int first) const {
    constexpr int kStep = Tr::kThreads / 8;
    static_assert(kTileRows % kStep == 0 && kStep % 8 == 0);
    const int thread = thread_index(), row = thread / 8, chunk = thread % 8;
    const int64_t at = int64_t{block} * kBlockK + chunk * 16;
    const uint8_t* from = codes + (scheduler.work_tile.batch * rows + first + row) * p.k + at;
    to += row * kBlockK + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int r = 0; r < kTileRows; r += kStep, from += kStep * p.k) {
      cp_async_16(to + r * kBlockK, from, first + row + r < rows && at < p.k);
    }
  }

  __device__ __forceinline__ void load_scale(int stage) const {
    const int thread = thread_index();
    const WorkTile& tile = scheduler.work_tile;
    const auto load = [&](float* to, const float* scales, int64_t rows, int row) {
      const int64_t at = (tile.batch * rows + row) * tile.k_end + block;
      cp_async_4(smem_address(to), scales + (row < rows ? at : 0), row < rows);
    };
    if (thread < Tr::kRows) {
      load(&shared.a_scale[stage][thread], p.a_scale, p.m, tile.row + thread);
    } else if (thread == Tr::kRows) {
      const int64_t rows = ceil_div(p.n, int64_t{kBColumns});
      load(&shared.b_scale[stage], p.b_scale, rows, tile.column / kBColumns);
    }
  }
};

// Loads the step-th 32 bytes of 16 rows of a.
template <typename A>
__device__ __forceinline__ void load_step(const A& a, int m, int step, uint32_t (&x)[kStepWords]) {
  if constexpr (kHasE4m3Mma) {
    a.load(m, step, x);
  } else {
    uint32_t codes[4];
    a.load(m, step, codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unpack_e4m3_f16(codes[i], x[i / 2 * 4 + i % 2], x[i / 2 * 4 + 2 + i % 2]);
    }
  }
}

// d += a b for one step: 16 * kM rows and 16 columns. Converted to f16, the four bytes of a
// register become operands of the first and of the second eight columns of a product of depth 16.
// This holds for both operands, so the order within the sum does not matter.
template <int kM>
__device__ __forceinline__ void multiply_step(float (&d)[kM][8],
                                              const uint32_t (&x)[kM][kMmaSteps][kStepWords],
                                              int step, const uint32_t (&y)[4]) {
  const auto half = [&](int m, int i) -> float (&)[4] {
    return reinterpret_cast<float (&)[4]>(d[m][4 * i]);
  };
  if constexpr (kHasE4m3Mma) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      mma_e4m3(half(m, 0), x[m][step], y[0], y[1]);
      mma_e4m3(half(m, 1), x[m][step], y[2], y[3]);
    }
  } else {
    uint32_t z[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack_e4m3_f16(y[i], z[i][0], z[i][1]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const auto& a = reinterpret_cast<const uint32_t (&)[4]>(x[m][step][4 * k]);
        mma_16<DType::kF16>(half(m, 0), a, z[k][0], z[k][1]);
        mma_16<DType::kF16>(half(m, 1), a, z[2 + k][0], z[2 + k][1]);
      }
    }
  }
}

// Adds the product of a stage, times its scales. Element 4 * i + 2 * r + e of sum[n][m] belongs to
// row 16 * m + 8 * r + lane / 4 and column 16 * n + 8 * i + lane % 4 * 2 + e of the warp's part of
// the work tile, which starts at (row, column).
template <typename Tr>
__device__ __forceinline__ void add_product(float (&sum)[Tr::kN][Tr::kM][8],
                                            const PortableShared<Tr>& shared, int stage, int row,
                                            int column) {
  const int lane = thread_index() & 31;
  const Operand<Side::kA, false, Tr::kRows> a(smem_address(shared.a[stage]), row, 0);
  const Operand<Side::kB, false, Tr::kColumns> b(smem_address(shared.b[stage]), column, 0);
  uint32_t next[4], x[Tr::kM][kMmaSteps][kStepWords];
  b.load(0, 0, next);
#pragma unroll
  for (int step = 0; step < kMmaSteps; ++step) {
#pragma unroll
    for (int m = 0; m < Tr::kM; ++m) load_step(a, m, step, x[m][step]);
  }
  float scale[Tr::kM][2];
#pragma unroll
  for (int i = 0; i < 2 * Tr::kM; ++i) {
    scale[i / 2][i % 2] = shared.a_scale[stage][row + 8 * i + lane / 4] * shared.b_scale[stage];
  }
#pragma unroll
  for (int n = 0; n < Tr::kN; ++n) {
    float d[Tr::kM][8];
    clear_fragments(d);
#pragma unroll
    for (int step = 0; step < kMmaSteps; ++step) {
      const uint32_t y[4] = {next[0], next[1], next[2], next[3]};
      const int upcoming = n * kMmaSteps + step + 1;
      if (upcoming < Tr::kN * kMmaSteps) b.load(upcoming / kMmaSteps, upcoming % kMmaSteps, next);
      multiply_step(d, x, step, y);
    }
#pragma unroll
    for (int m = 0; m < Tr::kM; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[n][m][i] = fmaf(scale[m][i / 2 % 2], d[m][i], sum[n][m][i]);
      }
    }
  }
}

// Rounds a warp's results and stores them. Lanes exchange values in pairs, so that each has four
// neighboring columns, and four lanes have the 16 columns of a row.
template <typename T, typename Tr>
__device__ void store_sums(const Fp8MatmulParams& p, int batch, int row, int column,
                           const float (&sum)[Tr::kN][Tr::kM][8]) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2;
  row += lane / 4, column += lane % 2 * 8 + lane % 4 / 2 * 4;
  const bool vectors = p.n % 4 == 0;
#pragma unroll
  for (int m = 0; m < Tr::kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t out_row = int64_t{row} + 16 * m + 8 * r;
      T* const out = static_cast<T*>(p.out) + (batch * p.m + out_row) * p.n;
#pragma unroll
      for (int n = 0; n < Tr::kN; ++n) {
        float kept[2], got[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float first = sum[n][m][2 * r + e], second = sum[n][m][4 + 2 * r + e];
          kept[e] = odd ? second : first;
          got[e] = __shfl_xor_sync(~0u, odd ? first : second, 1);
        }
        const Vector4<T> x = {
            static_cast<T>(odd ? got[0] : kept[0]), static_cast<T>(odd ? got[1] : kept[1]),
            static_cast<T>(odd ? kept[0] : got[0]), static_cast<T>(odd ? kept[1] : got[1])};
        const int64_t at = int64_t{column} + 16 * n, left = out_row < p.m ? p.n - at : 0;
        if (vectors) {
          if (left > 0) *reinterpret_cast<Vector4<T>*>(out + at) = x;
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (j < left) out[at + j] = x.x[j];
          }
        }
      }
    }
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtasPerSm)
    portable_matmul_kernel(const __grid_constant__ Fp8MatmulParams p) {
  auto& shared = dynamic_shared<PortableShared<Tr>>();
  const int warp = uniform(static_cast<int>(threadIdx.x / 32));
  const int row = warp / Tr::kWarpsAcross * Tr::kWarpRows;
  const int column = warp % Tr::kWarpsAcross * Tr::kWarpColumns;
  Loader<Tr> loader(p, shared);
#pragma unroll
  for (int stage = 0; stage + 1 < Tr::kStages; ++stage) loader.load(stage);
  int stage = 0;
  for (TileScheduler<Tr> scheduler(p); scheduler.next();) {
    float sum[Tr::kN][Tr::kM][8] = {};
    const WorkTile& tile = scheduler.work_tile;
#pragma unroll 1
    for (int left = tile.k_end; left > 0; --left) {
      cp_async_wait_group<Tr::kStages - 2>();
      __syncthreads();  // all threads' copies have landed, and all warps have read the stage before
      loader.load(stage == 0 ? Tr::kStages - 1 : stage - 1);
      add_product(sum, shared, stage, row, column);
      stage = stage + 1 < Tr::kStages ? stage + 1 : 0;
    }
    const auto store = [&]<typename T>() {
      store_sums<T, Tr>(p, tile.batch, tile.row + row, tile.column + column, sum);
    };
    if (p.dtype == DType::kF32) {
      store.template operator()<float>();
    } else if (p.dtype == DType::kBF16) {
      store.template operator()<__nv_bfloat16>();
    } else {
      store.template operator()<__half>();
    }
  }
}

using PortableMany = PortableTraits<128, 128, 4, 2, 1>;
using PortableFew = PortableTraits<32, 64, 1, 4, 2>;

}  // namespace jax_dsa::fp8
