// Dequantisation, x = q * scale, rounded to x's dtype, for blocks of 1x128 or 128x128.
//
// The kernel is bound by memory. Threads are assigned to blocks as in quantize.cu: sixteen lanes
// per block, 8 codes per lane, all loads before the first use. For 16-bit results a lane has eight
// adjacent codes, whose values are one 16-byte store. For float32 it has two groups of four
// adjacent codes, so that each 16-byte store of the lanes still covers whole sectors.

#include "common/launch.cuh"
#include "fp8/dequantize.h"
#include "fp8/pack.cuh"
#include "fp8/quantize.cuh"

namespace jax_dsa {
namespace {

using namespace fp8;

// Returns the offset in a block of a lane's first or second (`half`) four codes, for float32.
__device__ __forceinline__ int quad_offset(int lane, int half) {
  return half * kQuantizeBlock / 2 + lane * 4;
}

template <typename T, bool kVector>
__device__ __forceinline__ uint2 load_codes(const uint8_t* block, int lane, int width) {
  uint2 codes = {};
  if constexpr (kVector && sizeof(T) == 4) {
    const auto load = [&](int at) {
      return at < width ? __ldcs(reinterpret_cast<const uint32_t*>(block + at)) : 0;
    };
    codes = {load(quad_offset(lane, 0)), load(quad_offset(lane, 1))};
  } else if constexpr (kVector) {
    if (lane * kElementsPerLane < width) {
      codes = __ldcs(reinterpret_cast<const uint2*>(block + lane * kElementsPerLane));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      const uint32_t code = lane + i * kLanes < width ? block[lane + i * kLanes] : 0;
      (i < 4 ? codes.x : codes.y) |= code << (i % 4 * 8);
    }
  }
  return codes;
}

template <bool kVector, typename T>
__device__ __forceinline__ void store_values(T* block, int lane, int width,
                                             const float (&x)[kElementsPerLane]) {
  if constexpr (kVector && sizeof(T) == 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = quad_offset(lane, half);
      if (at < width)
        store_4(block + at, {x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]});
    }
  } else if constexpr (kVector) {
    const uint32_t words[4] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                               pack<T>(x[6], x[7])};
    store_16(block + lane * kElementsPerLane, words, lane * kElementsPerLane < width);
  } else {
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      if (lane + i * kLanes < width) block[lane + i * kLanes] = static_cast<T>(x[i]);
    }
  }
}

// kTiles: blocks have 128 rows.
template <typename T, bool kVector, bool kTiles>
__global__ void __launch_bounds__(kThreads, kVector ? 5 : 1)
    dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  const int lane = threadIdx.x % kLanes;
  const BlockRange range(p.batch * p.rows, p.cols);
  const int64_t blocks_per_row = ceil_div(p.cols, int64_t{kQuantizeBlock});
  uint2 codes[kBlocksPerThread];
  float scale[kBlocksPerThread];
  int64_t row = range.row, column = range.column, batch = kTiles ? row / p.rows : 0;
  if (kTiles) row -= batch * p.rows;
#pragma unroll
  for (int u = 0; u < kBlocksPerThread; ++u) {
    codes[u] = load_codes<T, kVector>(p.q + range.start + range.offset[u], lane, range.width[u]);
    int64_t block = range.first + u;
    if constexpr (kTiles) {
      const int64_t blocks_down = ceil_div(p.rows, int64_t{kQuantizeBlock});
      block = (batch * blocks_down + row / kQuantizeBlock) * blocks_per_row + column;
      if (++column == blocks_per_row) {
        column = 0;
        if (++row == p.rows) row = 0, ++batch;
      }
    }
    scale[u] = u < range.count ? __ldg(p.scale + block) : 0.f;
  }
#pragma unroll
  for (int u = 0; u < kBlocksPerThread; ++u) {
    float code[2][4], x[kElementsPerLane];
    unpack_e4m3(codes[u].x, code[0]);
    unpack_e4m3(codes[u].y, code[1]);
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) x[i] = code[i / 4][i % 4] * scale[u];
    store_values<kVector>(static_cast<T*>(p.x) + range.start + range.offset[u], lane,
                          range.width[u], x);
  }
}

template <typename T>
cudaError_t launch(const DequantizeParams& p, cudaStream_t stream) {
  const auto address = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.q);
  const bool vector = p.cols % kElementsPerLane == 0 && address % 16 == 0;
  const auto kernel =
      p.block_rows == 1
          ? (vector ? dequantize_kernel<T, true, false> : dequantize_kernel<T, false, false>)
          : (vector ? dequantize_kernel<T, true, true> : dequantize_kernel<T, false, true>);
  return launch_blocks(kernel, num_ctas(p.batch * p.rows, p.cols), kThreads, 0, stream, p);
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.rows == 0 || p.cols == 0) return cudaSuccess;
  if (p.block_rows != 1 && p.block_rows != kQuantizeBlock) return cudaErrorInvalidValue;
  return dispatch_dtype(p.dtype, [&]<typename T>() { return launch<T>(p, stream); });
}

}  // namespace jax_dsa
