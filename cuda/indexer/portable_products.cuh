// Products of the indexer's portable kernels. A warp holds 64 rows (keys or queries) in registers
// and multiplies them with 16 rows of a tile in shared memory at a time. The sum goes over
// channels.
//
// Channels are processed in steps of 32 bytes, whatever the dtype: 16 channels in bf16 take one
// mma.sync of depth 16, 32 channels in e4m3 take one of depth 32. GPUs without the latter convert
// e4m3 to f16: the held rows once, the rows of the tile each time, which takes 1 instruction per 2
// products. The four bytes of a register then become operands of the first and second eight
// columns. Both operands do so, so the order of channels does not matter.
//
// Each value of a tile that ldmatrix reads serves four products, because the warp holds four tiles
// of 16 rows.
#pragma once

#include "common/mma_tile.cuh"
#include "indexer/indexer.h"

namespace jax_dsa::indexer {

inline constexpr int kPortableWarps = 4, kPortableThreads = kPortableWarps * 32;
inline constexpr int kHeldRows = 64;                         // rows that a warp holds
inline constexpr int kCtaRows = kPortableWarps * kHeldRows;  // rows that a CTA holds
inline constexpr int kTileRows = 64, kPairRows = 16;         // of a tile; of one product

template <IndexerDType kDType_, int kChannels>
struct ProductTraits {
  static constexpr IndexerDType kDType = kDType_;
  static constexpr int kElementBytes = kDType == IndexerDType::kBF16 ? 2 : 1;
  static constexpr int kChannelBytes = kChannels * kElementBytes;
  static constexpr int kSteps = kChannelBytes / 32;
  static constexpr int kBlocks =
      ceil_div(kChannelBytes, 128);  // blocks of a tile, see mma_tile.cuh
  static constexpr int kTileBytes = kBlocks * kTileRows * 128;
};

template <typename Tr>
inline constexpr bool kConverts = Tr::kDType == IndexerDType::kE4M3 && !kHasE4m3Mma;

// Registers of a step of 16 held rows.
template <typename Tr>
inline constexpr int kStepWords = kConverts<Tr> ? 8 : 4;

// The rows that a warp holds.
template <typename Tr>
struct HeldRows {
  uint32_t x[kHeldRows / 16][Tr::kSteps][kStepWords<Tr>];
};

// Issues the cp.async of a row's 16-byte chunk. `tile` has kRows rows; `from` is the row in global
// memory, or null for zeros.
template <typename Tr, int kRows>
__device__ __forceinline__ void copy_chunk(uint32_t tile, int row, int chunk, const char* from,
                                           const void* any) {
#pragma unroll
  for (int b = 0; b < Tr::kBlocks; ++b) {
    const int byte = b * 128 + chunk * 16;
    if (byte >= Tr::kChannelBytes) break;
    cp_async_16(tile + (b * kRows + row) * 128 + (chunk ^ row % 8) * 16,
                from ? from + byte : static_cast<const char*>(any), from != nullptr);
  }
}

// Loads this warp's rows, 32 at a time, through `staging`: kTileBytes / 2 bytes of shared memory
// that no other warp uses. row(r) returns the address of row r, or null for zeros, and `any` is a
// valid address.
template <typename Tr, typename Row>
__device__ __forceinline__ void hold_rows(HeldRows<Tr>& held, uint32_t staging, const void* any,
                                          Row row) {
  constexpr int kRows = 32;
  const int lane = thread_index() & 31;
#pragma unroll
  for (int half = 0; half < kHeldRows / kRows; ++half) {
    __syncwarp();  // all lanes have read the rows before
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      copy_chunk<Tr, kRows>(staging, r + lane / 8, lane % 8, row(half * kRows + r + lane / 8), any);
    }
    cp_async_commit();
    cp_async_wait_group<0>();
    __syncwarp();
    const Operand<Side::kA, false, kRows> rows(staging, 0, 0);
#pragma unroll
    for (int m = 0; m < kRows / 16; ++m) {
#pragma unroll
      for (int k = 0; k < Tr::kSteps; ++k) {
        auto& to = held.x[half * (kRows / 16) + m][k];
        if constexpr (kConverts<Tr>) {
          uint32_t x[4];
          rows.load(m, k, x);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            unpack_e4m3_f16(x[i], to[i / 2 * 4 + i % 2], to[i / 2 * 4 + 2 + i % 2]);
          }
        } else {
          rows.load(m, k, to);
        }
      }
    }
  }
}

// Computes the products of the held rows with rows 16 * n + [0, 16) of a tile. Element 4 * i + 2 *
// r
// + e of d[m] belongs to held row 16 * m + 8 * r + lane / 4 and to row 8 * i + lane % 4 * 2 + e.
template <typename Tr>
__device__ __forceinline__ void multiply_held(float (&d)[kHeldRows / 16][8],
                                              const HeldRows<Tr>& held, uint32_t tile, int n) {
  const Operand<Side::kB, false, kTileRows> rows(tile, kPairRows * n, 0);
  clear_fragments(d);
  uint32_t next[4];
  rows.load(0, 0, next);
#pragma unroll
  for (int k = 0; k < Tr::kSteps; ++k) {
    uint32_t y[4] = {next[0], next[1], next[2], next[3]};
    if (k + 1 < Tr::kSteps) rows.load(0, k + 1, next);
    const auto accumulators = [&](int m, int i) -> float (&)[4] {
      return reinterpret_cast<float (&)[4]>(d[m][4 * i]);
    };
    if constexpr (kConverts<Tr>) {
      uint32_t z[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) unpack_e4m3_f16(y[i], z[i][0], z[i][1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < kHeldRows / 16; ++m) {
          const auto& x = reinterpret_cast<const uint32_t (&)[4]>(held.x[m][k][4 * half]);
          mma_16<DType::kF16>(accumulators(m, 0), x, z[half][0], z[half][1]);
          mma_16<DType::kF16>(accumulators(m, 1), x, z[2 + half][0], z[2 + half][1]);
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < kHeldRows / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (Tr::kDType == IndexerDType::kBF16) {
            mma_16<DType::kBF16>(accumulators(m, i), held.x[m][k], y[2 * i], y[2 * i + 1]);
          } else {
            mma_e4m3(accumulators(m, i), held.x[m][k], y[2 * i], y[2 * i + 1]);
          }
        }
      }
    }
  }
}

// Returns the held row whose i-th result a lane has once the four lanes that share eight of a
// thread's rows have divided them.
__device__ __forceinline__ int own_row(int i) {
  const int lane = thread_index() & 31;
  return (lane / 2 % 2 * 2 + i) * 16 + lane % 2 * 8 + lane / 4;
}

}  // namespace jax_dsa::indexer
