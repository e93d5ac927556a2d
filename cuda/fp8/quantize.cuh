// What the kernels share that quantise to e4m3 and back: a block's scale, correctly rounded
// division, and how threads share out blocks of 128 elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "common/ptx.cuh"
#include "common/types.h"
#include "fp8/quantize.h"

namespace jax_dsa::fp8 {

inline constexpr int kThreads = 256;
inline constexpr int kLanes = 16;  // threads that share a block
inline constexpr int kPerLane = kQuantizeBlock / kLanes;
inline constexpr int kUnroll = 4;  // blocks that a thread works on, where rows have blocks
inline constexpr int kBlocksPerCta = kThreads / kLanes * kUnroll;
inline constexpr float kMaxE4M3 = 448.f;
inline constexpr float kMinAmax = 1e-4f;
// Of what gradients are made from, which may lie far below that.
inline constexpr float kMinAmaxBackward = 1e-20f;

// One lane's part of a block.
template <typename T>
struct alignas(16) Chunk {
  T v[kPerLane];
};

__device__ __forceinline__ float2 pair(const Chunk<float>& chunk, int i) {
  return {chunk.v[2 * i], chunk.v[2 * i + 1]};
}
__device__ __forceinline__ float2 pair(const Chunk<__half>& chunk, int i) {
  return __half22float2({chunk.v[2 * i], chunk.v[2 * i + 1]});
}
__device__ __forceinline__ float2 pair(const Chunk<__nv_bfloat16>& chunk, int i) {
  const uint32_t bits = reinterpret_cast<const uint32_t*>(chunk.v)[i];  // one instruction a half
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// Magnitudes of the same pair as it lies, of which maxima cost an instruction for two elements.
__device__ __forceinline__ float2 magnitudes(const Chunk<float>& chunk, int i) {
  return {fabsf(chunk.v[2 * i]), fabsf(chunk.v[2 * i + 1])};
}
__device__ __forceinline__ __half2 magnitudes(const Chunk<__half>& chunk, int i) {
  return __habs2(reinterpret_cast<const __half2*>(chunk.v)[i]);
}
__device__ __forceinline__ __nv_bfloat162 magnitudes(const Chunk<__nv_bfloat16>& chunk, int i) {
  return __habs2(reinterpret_cast<const __nv_bfloat162*>(chunk.v)[i]);
}
// The larger ones; a NaN wins.
__device__ __forceinline__ float2 larger(float2 a, float2 b) {
  return {max_nan(a.x, b.x), max_nan(a.y, b.y)};
}
__device__ __forceinline__ __half2 larger(__half2 a, __half2 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ __nv_bfloat162 larger(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __hmax2_nan(a, b);
}
__device__ __forceinline__ float2 widened(float2 x) { return x; }
__device__ __forceinline__ float2 widened(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 widened(__nv_bfloat162 x) { return __bfloat1622float2(x); }

// 1 / x to within an ulp, for every scale there can be.
__device__ __forceinline__ float reciprocal(float x) {
  const float r = reciprocal_approx(x);
  return __fmaf_rn(__fmaf_rn(-x, r, 1.f), r, r);
}

// a / b, correctly rounded for normal b and `inverse` = 1 / b to within an ulp: enumerated for bf16
// and f16 `a` and the scales they lead to. Three instructions where __fdiv_rn takes ten, since a
// block divides 128 times by one number. The quotient's excess, not the remainder, keeps the sign
// of a zero.
__device__ __forceinline__ float divide(float a, float b, float inverse) {
  const float quotient = a * inverse;
  const float excess = __fmaf_rn(quotient, b, -a);
  return __fmaf_rn(-excess, inverse, quotient);
}

__device__ __forceinline__ float round_up_to_power_of_two(float x) {
  const uint32_t bits = (__float_as_uint(x) + 0x007fffffu) & 0xff800000u;
  return isnan(x) ? x : __uint_as_float(bits);
}

// What the elements of a block are divided by, of which `amax` (never less than one of the two
// above) is the largest.
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

// A scale's reciprocal to some 48 bits, for threads that divide many elements by it: a quotient
// then takes two instructions, as the products with both parts are rounded together. Neither part
// is negative, so that zeros keep their signs.
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

// The larger of `amax` and a pair's magnitudes; a NaN wins, so that it shows in the scale.
__device__ __forceinline__ float max_magnitude(float amax, float2 x) {
  return max_nan(max_nan(amax, fabsf(x.x)), fabsf(x.y));
}

__device__ __forceinline__ uint32_t to_e4m3(float2 low, float2 high) {
  const uint32_t a = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3);
  const uint32_t b = __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3);
  return a | b << 16;
}

__device__ __forceinline__ int clamp(int64_t x, int high) {
  return x < high ? static_cast<int>(x) : high;
}

// A lane's elements of a block of `width`: eight side by side, or, where addresses do not allow
// that, every sixteenth.
template <bool kVector>
__device__ __forceinline__ int element(int lane, int i) {
  return kVector ? lane * kPerLane + i : lane + i * kLanes;
}

template <bool kVector, typename T>
__device__ __forceinline__ Chunk<T> load(const T* block, int lane, int width) {
  Chunk<T> chunk = {};
  if constexpr (kVector) {
    if (lane * kPerLane < width) {
      constexpr int kWords = sizeof(chunk) / sizeof(uint4);
      const uint4* from = reinterpret_cast<const uint4*>(block + lane * kPerLane);
#pragma unroll
      for (int i = 0; i < kWords; ++i) reinterpret_cast<uint4*>(&chunk)[i] = __ldcs(from + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + i * kLanes < width) chunk.v[i] = block[lane + i * kLanes];
    }
  }
  return chunk;
}

template <bool kVector>
__device__ __forceinline__ void store(uint8_t* block, int lane, int width, uint2 codes) {
  if constexpr (kVector) {
    if (lane * kPerLane < width) *reinterpret_cast<uint2*>(block + lane * kPerLane) = codes;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t word = i < 4 ? codes.x : codes.y;
      if (lane + i * kLanes < width) block[lane + i * kLanes] = word >> (i % 4 * 8);
    }
  }
}

// Where the kUnroll blocks of a thread are: a block starts where the one before it ends, whatever
// the rows' length, so that one division finds them all.
struct Places {
  int64_t first;        // block
  int64_t row, column;  // of the first block: its row, and its number in that row
  int64_t start;        // of the first block
  int count;            // blocks that there are
  int width[kUnroll];   // of each block
  int offset[kUnroll];  // from `start`

  __device__ __forceinline__ Places(int64_t rows, int64_t cols) {
    const int64_t per_row = ceil_div(cols, int64_t{kQuantizeBlock});
    first = blockIdx.x * int64_t{kBlocksPerCta} + threadIdx.x / kLanes * int64_t{kUnroll};
    row = first / per_row;
    column = first - row * per_row;
    start = row * cols + column * kQuantizeBlock;
    // The blocks end where the array does, and their widths depend on at most kReach columns.
    constexpr int kReach = kUnroll * kQuantizeBlock;
    count = clamp(rows * per_row - first, kUnroll);
    const int whole_row = clamp(cols, kReach);
    int left = clamp(cols - column * kQuantizeBlock, kReach);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      offset[u] = u == 0 ? 0 : offset[u - 1] + width[u - 1];
      width[u] = u < count ? min(left, kQuantizeBlock) : 0;
      left = left > kQuantizeBlock ? left - kQuantizeBlock : whole_row;
    }
  }
};

// Blocks of threads for all blocks of 128 elements.
inline int64_t place_ctas(int64_t rows, int64_t cols) {
  return ceil_div(rows * ceil_div(cols, int64_t{kQuantizeBlock}), int64_t{kBlocksPerCta});
}

// Calls f<element type>().
template <typename F>
cudaError_t with_element_type(DType dtype, F f) {
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
