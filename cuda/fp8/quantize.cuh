// Common code of the kernels that quantise to e4m3 and dequantise: the scale of a block, correctly
// rounded division, and the assignment of blocks of 128 elements to threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/ptx.cuh"
#include "common/types.h"
#include "fp8/quantize.h"

namespace jax_dsa::fp8 {

inline constexpr int kThreads = 256;
inline constexpr int kLanes = 16;  // threads per block of 128 elements
inline constexpr int kElementsPerLane = kQuantizeBlock / kLanes;
inline constexpr int kBlocksPerThread = 4;  // in the kernels for 1x128 blocks
inline constexpr int kBlocksPerCta = kThreads / kLanes * kBlocksPerThread;
inline constexpr float kMaxE4M3 = 448.f;
inline constexpr float kMinAmax = 1e-4f;
// The minimum for operands of gradients, which may be far below 1e-4.
inline constexpr float kMinAmaxBackward = 1e-20f;

// One lane's elements of a block.
template <typename T>
struct alignas(16) Chunk {
  T v[kElementsPerLane];
};

__device__ __forceinline__ float2 pair(const Chunk<float>& chunk, int i) {
  return {chunk.v[2 * i], chunk.v[2 * i + 1]};
}
__device__ __forceinline__ float2 pair(const Chunk<__half>& chunk, int i) {
  return __half22float2({chunk.v[2 * i], chunk.v[2 * i + 1]});
}
__device__ __forceinline__ float2 pair(const Chunk<__nv_bfloat16>& chunk, int i) {
  const uint32_t bits =
      reinterpret_cast<const uint32_t*>(chunk.v)[i];  // one instruction per element
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// Returns the magnitudes of pair i in the input's dtype. The maximum of two pairs of 16-bit
// elements then takes one instruction.
__device__ __forceinline__ float2 magnitudes(const Chunk<float>& chunk, int i) {
  return {fabsf(chunk.v[2 * i]), fabsf(chunk.v[2 * i + 1])};
}
__device__ __forceinline__ __half2 magnitudes(const Chunk<__half>& chunk, int i) {
  return __habs2(reinterpret_cast<const __half2*>(chunk.v)[i]);
}
__device__ __forceinline__ __nv_bfloat162 magnitudes(const Chunk<__nv_bfloat16>& chunk, int i) {
  return __habs2(reinterpret_cast<const __nv_bfloat162*>(chunk.v)[i]);
}
// Returns the elementwise maximum. NaN propagates.
__device__ __forceinline__ float2 larger(float2 a, float2 b) {
  return {max_nan(a.x, b.x), max_nan(a.y, b.y)};
}
__device__ __forceinline__ __half2 larger(__half2 a, __half2 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ __nv_bfloat162 larger(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __hmax2_nan(a, b);
}
__device__ __forceinline__ float2 to_float2(float2 x) { return x; }
__device__ __forceinline__ float2 to_float2(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }

// Returns 1 / x to within an ulp, for every possible scale x.
__device__ __forceinline__ float reciprocal(float x) {
  const float r = reciprocal_approx(x);
  return __fmaf_rn(__fmaf_rn(-x, r, 1.f), r, r);
}

// Returns a / b, correctly rounded, for normal b and `inverse` = 1 / b to within an ulp. Tests have
// confirmed this for all bf16 and f16 values of `a` and all scales that they lead to. This takes
// three instructions where __fdiv_rn takes ten, because 128 elements share one reciprocal.
// Subtracting the excess of the quotient, instead of adding the remainder, keeps the sign of a
// zero.
__device__ __forceinline__ float divide(float a, float b, float inverse) {
  const float quotient = a * inverse;
  const float excess = __fmaf_rn(quotient, b, -a);
  return __fmaf_rn(-excess, inverse, quotient);
}

__device__ __forceinline__ float round_up_to_power_of_two(float x) {
  const uint32_t bits = (__float_as_uint(x) + 0x007fffffu) & 0xff800000u;
  return isnan(x) ? x : __uint_as_float(bits);
}

// The scale of a block whose largest magnitude is `amax`, raised to kMinAmax or kMinAmaxBackward.
struct Scale {
  float scale, inverse;

  __device__ __forceinline__ Scale(float amax, bool power_of_two) {
    scale = divide(amax, kMaxE4M3, 1.f / kMaxE4M3);
    if (power_of_two) scale = round_up_to_power_of_two(scale);
    inverse = reciprocal(scale);
  }
  __device__ __forceinline__ float2 divided(float2 x) const {
    return {divide(x.x, scale, inverse), divide(x.y, scale, inverse)};
  }
};

// The reciprocal of a scale to about 48 bits, as the sum of two floats. It costs more to compute,
// but a quotient takes only two instructions, because an FMA rounds the sum of both products once.
// It is for threads that divide many elements by the same scale. Neither float is negative, so
// zeros keep their signs.
struct Divisor {
  float high, low;

  __device__ __forceinline__ explicit Divisor(const Scale& scale) : high(scale.inverse) {
    float missing = __fmaf_rn(-scale.scale, high, 1.f);
    if (missing < 0) {
      high = __uint_as_float(__float_as_uint(high) - 1);
      missing = __fmaf_rn(-scale.scale, high, 1.f);
    }
    low = missing * high;
  }
  __device__ __forceinline__ Divisor(float high, float low) : high(high), low(low) {}
  __device__ __forceinline__ float2 divided(float2 x) const {
    return {__fmaf_rn(x.x, high, x.x * low), __fmaf_rn(x.y, high, x.y * low)};
  }
};

// Returns the maximum of `amax` and the magnitudes of a pair. NaN propagates into the scale.
__device__ __forceinline__ float max_magnitude(float amax, float2 x) {
  return max_nan(max_nan(amax, fabsf(x.x)), fabsf(x.y));
}

__device__ __forceinline__ uint32_t to_e4m3(float2 low, float2 high) {
  return pack_e4m3(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ int clamp(int64_t x, int high) {
  return x < high ? static_cast<int>(x) : high;
}

// Returns the index in its block of a lane's element i. A lane has eight adjacent elements, or, if
// addresses are not aligned, every sixteenth one.
template <bool kVector>
__device__ __forceinline__ int element(int lane, int i) {
  return kVector ? lane * kElementsPerLane + i : lane + i * kLanes;
}

template <bool kVector, typename T>
__device__ __forceinline__ Chunk<T> load(const T* block, int lane, int width) {
  Chunk<T> chunk = {};
  if constexpr (kVector) {
    if (lane * kElementsPerLane < width) {
      constexpr int kWords = sizeof(chunk) / sizeof(uint4);
      const uint4* from = reinterpret_cast<const uint4*>(block + lane * kElementsPerLane);
#pragma unroll
      for (int i = 0; i < kWords; ++i) reinterpret_cast<uint4*>(&chunk)[i] = __ldcs(from + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      if (lane + i * kLanes < width) chunk.v[i] = block[lane + i * kLanes];
    }
  }
  return chunk;
}

template <bool kVector>
__device__ __forceinline__ void store(uint8_t* block, int lane, int width, uint2 codes) {
  if constexpr (kVector) {
    if (lane * kElementsPerLane < width)
      *reinterpret_cast<uint2*>(block + lane * kElementsPerLane) = codes;
  } else {
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      const uint32_t word = i < 4 ? codes.x : codes.y;
      if (lane + i * kLanes < width) block[lane + i * kLanes] = word >> (i % 4 * 8);
    }
  }
}

// The kBlocksPerThread consecutive blocks of a thread. In memory, a block starts where the one
// before it ends, whatever the length of a row, so one division finds all of them.
struct BlockRange {
  int64_t first;                 // index of the first block
  int64_t row, column;           // of the first block: its row, and its index in that row
  int64_t start;                 // index of the first block's first element
  int count;                     // blocks that exist; fewer at the end of the array
  int width[kBlocksPerThread];   // elements of each block
  int offset[kBlocksPerThread];  // from `start`

  __device__ __forceinline__ BlockRange(int64_t rows, int64_t cols) {
    const int64_t per_row = ceil_div(cols, int64_t{kQuantizeBlock});
    first = blockIdx.x * int64_t{kBlocksPerCta} + threadIdx.x / kLanes * int64_t{kBlocksPerThread};
    row = first / per_row;
    column = first - row * per_row;
    start = row * cols + column * kQuantizeBlock;
    // Widths depend on at most kMaxColumns columns, so they can be computed in 32 bits.
    constexpr int kMaxColumns = kBlocksPerThread * kQuantizeBlock;
    count = clamp(rows * per_row - first, kBlocksPerThread);
    const int next_row = clamp(cols, kMaxColumns);
    int left = clamp(cols - column * kQuantizeBlock, kMaxColumns);
#pragma unroll
    for (int u = 0; u < kBlocksPerThread; ++u) {
      offset[u] = u == 0 ? 0 : offset[u - 1] + width[u - 1];
      width[u] = u < count ? min(left, kQuantizeBlock) : 0;
      left = left > kQuantizeBlock ? left - kQuantizeBlock : next_row;
    }
  }
};

// Returns the number of CTAs for an array in blocks of 1x128.
inline int64_t num_ctas(int64_t rows, int64_t cols) {
  return ceil_div(rows * ceil_div(cols, int64_t{kQuantizeBlock}), int64_t{kBlocksPerCta});
}

// Calls f<element type>().
template <typename F>
cudaError_t dispatch_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kBF16:
      return f.template operator()<__nv_bfloat16>();
    case DType::kF16:
      return f.template operator()<__half>();
    case DType::kF32:
      return f.template operator()<float>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa::fp8
