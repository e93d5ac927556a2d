// Building blocks of tensor-core kernels that use only instructions of sm_80: tiles in shared
// memory that cp.async fills, their fragments for mma.sync, and products.
//
// A tile consists of blocks of 64 columns of 16-bit elements. A row of a block has 128 bytes, and
// the 16-byte chunk c of row r is stored at chunk c ^ (r % 8). cp.async, ldmatrix and the functions
// below then have no bank conflicts. common/tile.cuh describes the same layout for wgmma. Tiles are
// aligned to 128 bytes. Row and column arguments are multiples of 16 where not stated otherwise.
//
// The functions recompute addresses that depend on the thread. If the compiler moved them out of
// loops, they would cost registers that the accumulators need.
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/ptx.cuh"

namespace jax_dsa {

// ---- copies -------------------------------------------------------------------------------------

// Issues the cp.async of a tile of kRows rows and kBlocks blocks. `from` is its first row in global
// memory, and rows are `stride` elements apart. The first `columns` columns, a multiple of 8,
// exist; row r is read only if exists(r). Everything else becomes zero. Each eight threads copy the
// 128 bytes of a row of a block.
template <int kRows, int kBlocks, int kThreads, typename Exists>
__device__ __forceinline__ void load_tile(uint32_t tile, const void* from, int64_t stride,
                                          int columns, Exists exists) {
  constexpr int kStep = kThreads / 8;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);
  const int thread = thread_index(), row = thread >> 3, chunk = thread & 7;
  const uint32_t to = tile + row * 128 + (chunk ^ row % 8) * 16;
  const uint16_t* at = static_cast<const uint16_t*>(from) + row * stride + chunk * 8;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep, at += kStep * stride) {
    const bool valid = exists(row + r);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      cp_async_16(to + (b * kRows + r) * 128, at + b * 64, valid && b * 64 + chunk * 8 < columns);
    }
  }
}

// Issues the cp.async of a tile of kRows rows that lie anywhere: row r is at from(r), or becomes
// zero if that is null. The first `columns` columns, a multiple of 8, exist; the others become
// zero.
template <int kRows, int kBlocks, int kThreads, typename From>
__device__ __forceinline__ void gather_tile(uint32_t tile, int columns, From from) {
  constexpr int kStep = kThreads / 8;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);
  const int thread = thread_index(), row = thread >> 3, chunk = thread & 7;
  const uint32_t to = tile + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
    const uint16_t* const at = from(row + r);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      cp_async_16(to + (b * kRows + r) * 128, at + b * 64 + chunk * 8,
                  at != nullptr && b * 64 + chunk * 8 < columns);
    }
  }
}

// Stores kRows rows of a tile of kTileRows rows to places that lie anywhere, by a warp: row r to
// to(r), or nowhere if that is null. `tile` is the address of the first of these rows.
template <int kTileRows, int kRows, int kBlocks, typename To>
__device__ __forceinline__ void scatter_tile(uint32_t tile, int columns, To to) {
  const int lane = thread_index() & 31, chunk = lane & 7;
#pragma unroll
  for (int row = lane >> 3; row < kRows; row += 4) {
    uint16_t* const at = to(row);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t x[4];
      load_shared_16(tile + (b * kTileRows + row) * 128 + (chunk ^ row % 8) * 16, x);
      store_16(at + b * 64 + chunk * 8, x, at != nullptr && b * 64 + chunk * 8 < columns);
    }
  }
}

// Stores rows of a tile of kTileRows rows and kBlocks blocks to global memory: kRows rows, of which
// `rows` exist, by kThreads threads. `thread` is the index among them. `tile` is the address of the
// first of these rows.
template <int kTileRows, int kRows, int kBlocks, int kThreads>
__device__ __forceinline__ void store_tile(uint32_t tile, void* to, int64_t stride, int rows,
                                           int columns, int thread) {
  constexpr int kStep = kThreads / 8;
  const int chunk = thread % 8;
#pragma unroll
  for (int row = thread / 8; row < kRows; row += kStep) {
    uint16_t* const at = static_cast<uint16_t*>(to) + row * stride + chunk * 8;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t x[4];
      load_shared_16(tile + (b * kTileRows + row) * 128 + (chunk ^ row % 8) * 16, x);
      store_16(at + b * 64, x, row < rows && b * 64 + chunk * 8 < columns);
    }
  }
}

// ---- fragments ----------------------------------------------------------------------------------

enum class Side { kA, kB };  // an operand of d += a b

// Where the column of the n-th 16 columns is, for a warp that owns kSlice columns of every block.
template <int kSlice>
__device__ constexpr int slice_column(int n) {
  return n * 16 / kSlice * 64 + n * 16 % kSlice;
}

// An operand in a tile with kRows rows. If kContractsRows, the product sums over the rows of the
// tile, else over its columns. The operand of this warp starts at (row, column). It has kSlice
// columns of every block, from the column on: a power of two, of which the column is a multiple.
template <Side kSide, bool kContractsRows, int kRows, int kSlice = 64>
class Operand {
 public:
  __device__ __forceinline__ Operand(uint32_t tile, int row, int column) {
    // The lane gives the address of a row of one of four 8x8 matrices. The second matrix lies below
    // the first or, in the other order, beside it.
    const int lane = thread_index() & 31;
    constexpr bool kDown = (kSide == Side::kA) != kContractsRows;
    const int r = row + lane % 8 + (kDown ? lane / 8 % 2 : lane / 16) * 8;
    const int chunk = column / 8 + (kDown ? lane / 16 : lane / 8 % 2);
    at = tile + (chunk / 8 * kRows + r) * 128 + ((chunk ^ lane) & 7) * 16;
  }
  // Loads the fragment of rows (of a) or columns (of b) 16 * n + [0, 16), contracted over
  // 16 * k + [0, 16). For b, the first two registers belong to the first eight columns.
  __device__ __forceinline__ void load(int n, int k, uint32_t (&x)[4]) const {
    const int row = 16 * (kContractsRows ? k : n);
    const int column = slice_column<kSlice>(kContractsRows ? n : k);
    const uint32_t address = (at ^ (column % 64 * 2)) + (column / 64 * kRows + row) * 128;
    if constexpr (kContractsRows) {
      load_matrix_x4_transposed(address, x);
    } else {
      load_matrix_x4(address, x);
    }
  }

  // Returns the operand at the same place of another tile, whose address is `offset` bytes higher.
  __device__ __forceinline__ Operand moved(uint32_t offset) const {
    Operand x = *this;
    x.at += offset;
    return x;
  }

 private:
  uint32_t at;
};

// An operand a in registers: packed accumulators of an earlier product.
template <int kM, int kSteps>
struct RegisterOperand {
  const uint32_t (&x)[kM][kSteps][4];
  __device__ __forceinline__ void load(int n, int k, uint32_t (&y)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = x[n][k][i];
  }
};

// d += a b for 16 * kM rows, 8 * kN / 4 columns and 16 * kSteps contracted elements. d[m] is the
// accumulator fragment of 16 rows: element 4 * n + i belongs to column 8 * n + lane % 4 * 2 + i % 2
// and to row lane / 4 + i / 2 * 8. beside(k) is work to do beside the products of each 16 elements.
template <DType kType, int kSteps, int kM, int kN, typename A, typename B, typename Beside>
__device__ __forceinline__ void multiply_tiles(float (&d)[kM][kN], const A& a, const B& b,
                                               Beside beside) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t x[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) a.load(m, k, x[m]);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      uint32_t y[4];
      b.load(n, k, y);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_16<kType>(reinterpret_cast<float (&)[4]>(d[m][8 * n + 4 * i]), x[m], y[2 * i],
                        y[2 * i + 1]);
        }
      }
    }
    beside(k);
  }
}
template <DType kType, int kSteps, int kM, int kN, typename A, typename B>
__device__ __forceinline__ void multiply_tiles(float (&d)[kM][kN], const A& a, const B& b) {
  multiply_tiles<kType, kSteps>(d, a, b, [](int) {});
}

// Packs accumulators as an operand of another product.
template <DType kType, int kM, int kN>
__device__ __forceinline__ void pack_fragments(const float (&d)[kM][kN],
                                               uint32_t (&x)[kM][kN / 8][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      x[m][i / 8][i / 2 % 4] = pack_16<kType>(d[m][i], d[m][i + 1]);
    }
  }
}

// Stores an accumulator fragment of 16 rows to a tile with kRows rows, from (row, column) on,
// rounded to 16 bits. Its columns are those of an operand with kSlice. value(i) returns element i.
template <DType kType, int kRows, int kN, int kSlice = 64, typename Value>
__device__ __forceinline__ void store_fragment(uint32_t tile, int row, int column, Value value) {
  const int lane = thread_index() & 31, chunk = column / 8;
  const uint32_t at = tile + (chunk / 8 * kRows + row + lane / 4) * 128 +
                      ((chunk ^ lane / 4) & 7) * 16 + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < kN; i += 2) {
    const int c = slice_column<kSlice>(i / 8) + i / 4 % 2 * 8;
    store_shared_4((at ^ (c % 64 * 2)) + (c / 64 * kRows + i / 2 % 2 * 8) * 128,
                   pack_16<kType>(value(i), value(i + 1)));
  }
}

// Sets an accumulator to zero.
template <int kM, int kN>
__device__ __forceinline__ void clear_fragments(float (&d)[kM][kN]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int i = 0; i < kN; ++i) d[m][i] = 0.f;
  }
}

}  // namespace jax_dsa
