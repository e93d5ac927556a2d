// Quantisation in tiles of 128 rows and 128 columns. One CTA processes one tile. It reads the tile
// once and keeps it in registers, eight rows and eight columns per thread.
//
// The kernels are bound by memory. A CTA has a whole tile in flight (32 KiB for bf16). Maxima of
// rows are found with shuffles, maxima of columns and tiles through shared memory.
//
// Transposed codes also go through shared memory. The 128 codes of a column form 16 chunks of 8.
// The index of a chunk is swizzled with the index of the column, so that adjacent threads access
// different banks.
//
// If rows (or rows of the transpose) do not start at 16-byte boundaries, accesses are element-wise.

#include "common/launch.cuh"
#include "fp8/quantize.cuh"
#include "fp8/quantize_tiles.h"

namespace jax_dsa {
namespace {

using namespace fp8;

constexpr int kTile = kQuantizeBlock;             // rows and columns
constexpr int kRows = kTile * kLanes / kThreads;  // per thread
static_assert(kRows == 8 && kElementsPerLane == 8);

// The number of CTAs per SM that leaves enough registers for a tile. kCtasFor16Bits is the number
// for 16-bit elements.
template <typename T, bool kVector, int kCtasFor16Bits>
constexpr int kCtas = !kVector         ? 1
                      : sizeof(T) == 2 ? kCtasFor16Bits
                                       : 2;

// A CTA's tile, and the thread's rows of it.
struct Tile {
  int tiles_across, tiles_down;  // tiles of a batch entry
  int batch, row, column;        // which tile, counted in tiles
  int height, width;             // 128, or less at the ends of x
  int lane, own_row;             // the thread has rows own_row to own_row + 7 of the tile

  template <typename Params>
  __device__ explicit Tile(const Params& p)
      : tiles_across(static_cast<int>(ceil_div(p.cols, int64_t{kTile}))),
        tiles_down(static_cast<int>(ceil_div(p.rows, int64_t{kTile}))),
        lane(threadIdx.x % kLanes),
        own_row(threadIdx.x / kLanes * kRows) {
    const int tile = static_cast<int>(blockIdx.x), row_index = tile / tiles_across;
    column = tile - row_index * tiles_across;
    batch = row_index / tiles_down, row = row_index - batch * tiles_down;
    height = clamp(p.rows - int64_t{row} * kTile, kTile);
    width = clamp(p.cols - int64_t{column} * kTile, kTile);
  }

  // Returns the index in x of the first element of this thread's first row.
  template <typename Params>
  __device__ int64_t start(const Params& p) const {
    return (batch * p.rows + int64_t{row} * kTile + own_row) * p.cols + int64_t{column} * kTile;
  }
  // Returns the number of valid elements of this thread's row i.
  __device__ int row_width(int i) const { return own_row + i < height ? width : 0; }
};

template <bool kVector, typename T, typename Params>
__device__ __forceinline__ void load_tile(const Params& p, const Tile& tile,
                                          Chunk<T> (&chunk)[kRows]) {
  const T* from = static_cast<const T*>(p.x) + tile.start(p);
#pragma unroll
  for (int i = 0; i < kRows; ++i, from += p.cols) {
    chunk[i] = load<kVector>(from, tile.lane, tile.row_width(i));
  }
}

// Makes the compiler treat the registers of `chunk` as changed. It then neither computes later uses
// early nor keeps values from before this point. Otherwise the registers would not suffice to load
// all rows before the first is used.
template <typename T>
__device__ __forceinline__ void pin(Chunk<T>& chunk) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(chunk) / 4); ++i) {
    asm volatile("" : "+r"(reinterpret_cast<uint32_t*>(&chunk)[i]));
  }
}

// Returns the codes of a chunk. `By` is Scale or Divisor.
template <typename T, typename By>
__device__ __forceinline__ uint2 quantize(const Chunk<T>& chunk, const By& by) {
  float2 v[kElementsPerLane / 2];
#pragma unroll
  for (int i = 0; i < kElementsPerLane / 2; ++i) v[i] = by.divided(pair(chunk, i));
  return {to_e4m3(v[0], v[1]), to_e4m3(v[2], v[3])};
}

// ---- transposed codes --------------------------------------------------------------------------

// Returns the offset in shared memory of a column's codes of the eight rows from 8 * chunk_index
// on.
__device__ __forceinline__ int transposed_at(int column, int chunk_index) {
  return column * kTile + ((chunk_index ^ column / kElementsPerLane) * kRows);
}

// Copies the codes from shared memory to rows of the transpose. A barrier must come before.
template <bool kVector, typename Params>
__device__ __forceinline__ void store_transposed(const Params& p, const Tile& tile,
                                                 const uint8_t* transposed) {
#pragma unroll
  for (int i = 0; i < kTile; i += kThreads / kLanes) {
    const int column = i + threadIdx.x / kLanes;
    if (column >= tile.width) continue;
    const int64_t row_index = tile.batch * p.cols + int64_t{tile.column} * kTile + column;
    uint8_t* const to = p.q_transposed + row_index * p.rows + int64_t{tile.row} * kTile;
    if constexpr (kVector) {
      const auto* from = transposed + transposed_at(column, tile.lane);
      store<true>(to, tile.lane, tile.height, *reinterpret_cast<const uint2*>(from));
    } else {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int row = element<false>(tile.lane, j);
        const int at = transposed_at(column, row / kRows) + row % kRows;
        if (row < tile.height) to[row] = transposed[at];
      }
    }
  }
}

// Transposes 4x4 codes.
__device__ __forceinline__ void transpose_4x4(const uint32_t (&row)[4], uint32_t (&column)[4]) {
  const uint32_t low[2] = {__byte_perm(row[0], row[1], 0x5140),
                           __byte_perm(row[2], row[3], 0x5140)};
  const uint32_t high[2] = {__byte_perm(row[0], row[1], 0x7362),
                            __byte_perm(row[2], row[3], 0x7362)};
  column[0] = __byte_perm(low[0], low[1], 0x5410);
  column[1] = __byte_perm(low[0], low[1], 0x7632);
  column[2] = __byte_perm(high[0], high[1], 0x5410);
  column[3] = __byte_perm(high[0], high[1], 0x7632);
}

// Stores a thread's 8x8 codes, transposed, in shared memory.
template <bool kVector>
__device__ __forceinline__ void store_transposed_in_shared(uint8_t* transposed, int lane,
                                                           const uint2 (&codes)[kRows]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t row[2][4], column[2][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) row[i / 4][i % 4] = half == 0 ? codes[i].x : codes[i].y;
    transpose_4x4(row[0], column[0]);
    transpose_4x4(row[1], column[1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int to = transposed_at(element<kVector>(lane, 4 * half + j), threadIdx.x / kLanes);
      *reinterpret_cast<uint2*>(transposed + to) = {column[0][j], column[1][j]};
    }
  }
}

// ---- one scale per tile ------------------------------------------------------------------------

struct alignas(16) TilesShared {
  uint8_t transposed[kTile * kTile];
  float largest[kThreads / 32];  // by warp
};

// Stores the maximum of a warp's values.
__device__ __forceinline__ void put_largest(float (&largest)[kThreads / 32], float amax) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    amax = max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
  }
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = amax;
}

// Returns the maximum of the values of all warps. A barrier must come before.
__device__ __forceinline__ float largest_of(const float (&largest)[kThreads / 32]) {
  float amax = largest[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) amax = max_nan(amax, largest[i]);
  return amax;
}

template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads, kCtas<T, kVector, 3>)
    tiles_kernel(const __grid_constant__ QuantizeTilesParams p) {
  auto& [transposed, largest] = dynamic_shared<TilesShared>();
  const Tile tile(p);
  Chunk<T> chunk[kRows];
  load_tile<kVector>(p, tile, chunk);
  auto own_amax = magnitudes(chunk[0], 0);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kElementsPerLane / 2; ++j)
      own_amax = larger(own_amax, magnitudes(chunk[i], j));
  }
  put_largest(largest, max_magnitude(kMinAmax, to_float2(own_amax)));
  __syncthreads();
  const Scale scale(largest_of(largest), p.power_of_two_scale);
  uint8_t* to = p.q + tile.start(p);
  uint2 codes[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i, to += p.cols) {
    codes[i] = quantize(chunk[i], scale);
    store<kVector>(to, tile.lane, tile.row_width(i), codes[i]);
  }
  if (threadIdx.x == 0) p.scale[blockIdx.x] = scale.scale;
  if (p.q_transposed == nullptr) return;
  store_transposed_in_shared<kVector>(transposed, tile.lane, codes);
  __syncthreads();
  store_transposed<kVector>(p, tile, transposed);
}

// ---- scales per row, and one scale per tile of the transpose ------------------------------------

// Returns the maximum of row lane / 2. Each of the 16 lanes has partial maxima of all eight rows.
// In every step a lane keeps half of its rows and sends the others to the lane that keeps those.
// This takes fewer shuffles than finding all maxima in all lanes, and only two lanes, not 16, then
// compute the same scale.
__device__ __forceinline__ float reduce_row_amax(float (&amax)[kRows], int lane) {
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2) {
    const bool upper = lane & 2 * half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? amax[i + half] : amax[i];
      const float sent = upper ? amax[i] : amax[i + half];
      amax[i] = max_nan(kept, __shfl_xor_sync(0xffffffffu, sent, 2 * half));
    }
  }
  return max_nan(amax[0], __shfl_xor_sync(0xffffffffu, amax[0], 1));
}

template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads, kCtas<T, kVector, 3>)
    transpose_kernel(const __grid_constant__ QuantizeTransposeParams p) {
  auto& [transposed, largest] = dynamic_shared<TilesShared>();
  const Tile tile(p);
  Chunk<T> chunk[kRows];
  load_tile<kVector>(p, tile, chunk);
  float amax[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    auto row_amax = magnitudes(chunk[i], 0);
#pragma unroll
    for (int j = 1; j < kElementsPerLane / 2; ++j)
      row_amax = larger(row_amax, magnitudes(chunk[i], j));
    amax[i] = max_magnitude(kMinAmaxBackward, to_float2(row_amax));
  }
  const float own_amax = reduce_row_amax(amax, tile.lane);
  put_largest(largest, own_amax);

  const Scale row_scale(own_amax, p.power_of_two_scale);
  const Divisor own_divisor(row_scale);
  const int64_t row = tile.batch * p.rows + int64_t{tile.row} * kTile + tile.own_row;
  if (tile.lane % 2 == 0 && tile.own_row + tile.lane / 2 < tile.height) {
    p.scale[(row + tile.lane / 2) * tile.tiles_across + tile.column] = row_scale.scale;
  }
  uint8_t* to = p.q + tile.start(p);
#pragma unroll
  for (int i = 0; i < kRows; ++i, to += p.cols) {
    pin(chunk[i]);
    const Divisor divisor(__shfl_sync(0xffffffffu, own_divisor.high, 2 * i, kLanes),
                          __shfl_sync(0xffffffffu, own_divisor.low, 2 * i, kLanes));
    store<kVector>(to, tile.lane, tile.row_width(i), quantize(chunk[i], divisor));
  }

  __syncthreads();
  const Scale scale(largest_of(largest), p.power_of_two_scale);
  if (threadIdx.x == 0) {
    const int64_t tile_row = int64_t{tile.batch} * tile.tiles_across + tile.column;
    p.scale_transposed[tile_row * tile.tiles_down + tile.row] = scale.scale;
  }
  const Divisor divisor(scale);
  uint2 codes[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    pin(chunk[i]);
    codes[i] = quantize(chunk[i], divisor);
  }
  store_transposed_in_shared<kVector>(transposed, tile.lane, codes);
  __syncthreads();
  store_transposed<kVector>(p, tile, transposed);
}

// ---- scales per column -------------------------------------------------------------------------

struct alignas(16) ColumnsShared {
  uint8_t transposed[kTile * kTile];
  // Maxima of columns, by warp. The first column of each lane comes first, then the second column
  // of each lane, and so on, so that adjacent threads access different banks.
  float largest[kThreads / 32][kTile];
  Divisor divisors[kTile];  // of columns, in the same order
};

template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads, kCtas<T, kVector, 4>)
    columns_kernel(const __grid_constant__ QuantizeColumnsParams p) {
  auto& [transposed, largest, divisors] = dynamic_shared<ColumnsShared>();
  const Tile tile(p);
  Chunk<T> chunk[kRows];
  load_tile<kVector>(p, tile, chunk);

  decltype(magnitudes(chunk[0], 0)) column_amax[kElementsPerLane / 2];
#pragma unroll
  for (int j = 0; j < kElementsPerLane / 2; ++j) {
    column_amax[j] = magnitudes(chunk[0], j);
#pragma unroll
    for (int i = 1; i < kRows; ++i)
      column_amax[j] = larger(column_amax[j], magnitudes(chunk[i], j));
  }
#pragma unroll
  for (int j = 0; j < kElementsPerLane / 2; ++j) {
    float2 amax = to_float2(column_amax[j]);
    amax = larger(amax, {__shfl_xor_sync(0xffffffffu, amax.x, kLanes),
                         __shfl_xor_sync(0xffffffffu, amax.y, kLanes)});
    if (threadIdx.x % 32 < kLanes) {
      largest[threadIdx.x / 32][2 * j * kLanes + tile.lane] = amax.x;
      largest[threadIdx.x / 32][(2 * j + 1) * kLanes + tile.lane] = amax.y;
    }
  }
  __syncthreads();

  if (threadIdx.x < kTile) {
    float amax = kMinAmaxBackward;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) amax = max_nan(amax, largest[i][threadIdx.x]);
    const Scale scale(amax, p.power_of_two_scale);
    divisors[threadIdx.x] = Divisor(scale);
    const int column = element<kVector>(tile.lane, threadIdx.x / kLanes);
    if (column < tile.width) {
      const int64_t row_index = tile.batch * p.cols + int64_t{tile.column} * kTile + column;
      p.scale_transposed[row_index * tile.tiles_down + tile.row] = scale.scale;
    }
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kRows; ++i) pin(chunk[i]);
#pragma unroll
  for (int j = 0; j < kElementsPerLane / 2; ++j) {
    float2 v[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i] = pair(chunk[i], j);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int column = element<kVector>(tile.lane, 2 * j + side);
      const Divisor divisor = divisors[(2 * j + side) * kLanes + tile.lane];
      float2 y[kRows / 2];
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        y[i] = side == 0 ? divisor.divided({v[2 * i].x, v[2 * i + 1].x})
                         : divisor.divided({v[2 * i].y, v[2 * i + 1].y});
      }
      *reinterpret_cast<uint2*>(transposed + transposed_at(column, threadIdx.x / kLanes)) = {
          to_e4m3(y[0], y[1]), to_e4m3(y[2], y[3])};
    }
  }
  __syncthreads();
  store_transposed<kVector>(p, tile, transposed);
}

template <typename Params>
int64_t num_tiles(const Params& p) {
  return p.batch * ceil_div(p.rows, int64_t{kTile}) * ceil_div(p.cols, int64_t{kTile});
}

// Calls f<element type, whether accesses are vectors>().
template <typename Params, typename F>
cudaError_t dispatch(const Params& p, const uint8_t* q, F f) {
  if (p.batch == 0 || p.rows == 0 || p.cols == 0) return cudaSuccess;
  if (num_tiles(p) > INT32_MAX) return cudaErrorInvalidValue;
  const auto address = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(q) |
                       reinterpret_cast<uintptr_t>(p.q_transposed);
  const bool rows = p.q_transposed == nullptr || p.rows % kElementsPerLane == 0;
  const bool vector = p.cols % kElementsPerLane == 0 && rows && address % 16 == 0;
  return dispatch_dtype(p.dtype, [&]<typename T>() {
    return vector ? f.template operator()<T, true>() : f.template operator()<T, false>();
  });
}

}  // namespace

cudaError_t launch_quantize_tiles(const QuantizeTilesParams& p, cudaStream_t stream) {
  return dispatch(p, p.q, [&]<typename T, bool kVector>() {
    return launch_blocks(tiles_kernel<T, kVector>, num_tiles(p), kThreads, sizeof(TilesShared),
                         stream, p);
  });
}

cudaError_t launch_quantize_transpose(const QuantizeTransposeParams& p, cudaStream_t stream) {
  return dispatch(p, p.q, [&]<typename T, bool kVector>() {
    return launch_blocks(transpose_kernel<T, kVector>, num_tiles(p), kThreads, sizeof(TilesShared),
                         stream, p);
  });
}

cudaError_t launch_quantize_columns(const QuantizeColumnsParams& p, cudaStream_t stream) {
  return dispatch(p, nullptr, [&]<typename T, bool kVector>() {
    return launch_blocks(columns_kernel<T, kVector>, num_tiles(p), kThreads, sizeof(ColumnsShared),
                         stream, p);
  });
}

}  // namespace jax_dsa
