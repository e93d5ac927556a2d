// q = e4m3(x / scale), scale = max(amax, 1e-4) / 448, for every 1x128 block of a row; a row's last
// block may be shorter.
//
// Bound by memory: a bf16 element costs 2 bytes read and 1 + 4/128 written, so everything serves
// bytes in flight. Sixteen lanes own a block, 8 elements a lane (16-byte loads, an 8-byte store); a
// lane loads its part of kUnroll consecutive blocks before it uses the first. No shared memory.
// Rows that do not start at 16-byte boundaries take element-wise loads and stores, lane-strided so
// that they still coalesce.
//
// Both divisions are correctly rounded, as the XLA implementation's are, so that the codes agree
// bit for bit.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "fp8/quantize.h"

namespace jax_dsa {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  // threads that share a block
constexpr int kPerLane = kQuantizeBlock / kLanes;
constexpr int kUnroll = 4;  // blocks that a thread works on
constexpr int kBlocksPerCta = kThreads / kLanes * kUnroll;
constexpr float kMaxE4M3 = 448.f;
constexpr float kMinAmax = 1e-4f;

// One lane's part of a block.
template <typename T>
struct alignas(16) Chunk {
  T v[kPerLane];
};

__device__ float2 pair(const Chunk<float>& chunk, int i) {
  return {chunk.v[2 * i], chunk.v[2 * i + 1]};
}
__device__ float2 pair(const Chunk<__half>& chunk, int i) {
  return __half22float2({chunk.v[2 * i], chunk.v[2 * i + 1]});
}
__device__ float2 pair(const Chunk<__nv_bfloat16>& chunk, int i) {
  const uint32_t bits = reinterpret_cast<const uint32_t*>(chunk.v)[i];  // one instruction a half
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// 1 / x to within an ulp, for every scale there can be.
__device__ float reciprocal(float x) {
  const float r = reciprocal_approx(x);
  return __fmaf_rn(__fmaf_rn(-x, r, 1.f), r, r);
}

// a / b, correctly rounded for normal b and `inverse` = 1 / b to within an ulp: enumerated for bf16
// and f16 `a` and the scales they lead to. Three instructions where __fdiv_rn takes ten, since a
// block divides 128 times by one number. The quotient's excess, not the remainder, keeps the sign
// of a zero.
__device__ float divide(float a, float b, float inverse) {
  const float quotient = a * inverse;
  const float excess = __fmaf_rn(quotient, b, -a);
  return __fmaf_rn(-excess, inverse, quotient);
}

__device__ float round_up_to_power_of_two(float x) {
  const uint32_t bits = (__float_as_uint(x) + 0x007fffffu) & 0xff800000u;
  return isnan(x) ? x : __uint_as_float(bits);
}

__device__ int clamp(int64_t x, int high) { return x < high ? static_cast<int>(x) : high; }

template <bool kVector, typename T>
__device__ Chunk<T> load(const T* block, int lane, int width) {
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
__device__ void store(uint8_t* block, int lane, int width, uint2 codes) {
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

__device__ uint32_t to_e4m3(float2 low, float2 high) {
  const uint32_t a = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3);
  const uint32_t b = __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3);
  return a | b << 16;
}

// Five blocks an SM leave 48 registers a thread: with fewer the compiler sinks three of the four
// loads below the first use.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads, kVector ? 5 : 1)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  const int lane = threadIdx.x % kLanes;
  const int64_t blocks_per_row = ceil_div(p.cols, int64_t{kQuantizeBlock});
  const int64_t first =
      blockIdx.x * int64_t{kBlocksPerCta} + threadIdx.x / kLanes * int64_t{kUnroll};
  const int64_t row = first / blocks_per_row;
  const int64_t col = (first - row * blocks_per_row) * kQuantizeBlock;
  const int64_t start = row * p.cols + col;

  // This thread's blocks end where the array does, and its blocks' widths depend on at most kReach
  // columns.
  constexpr int kReach = kUnroll * kQuantizeBlock;
  const int blocks = clamp(p.rows * blocks_per_row - first, kUnroll);
  const int whole_row = clamp(p.cols, kReach);
  int left = clamp(p.cols - col, kReach);
  int width[kUnroll];
  int offset[kUnroll];  // from `start`; rows follow each other without a gap
  Chunk<T> chunk[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    offset[u] = u == 0 ? 0 : offset[u - 1] + width[u - 1];
    width[u] = u < blocks ? min(left, kQuantizeBlock) : 0;
    chunk[u] = load<kVector>(static_cast<const T*>(p.x) + start + offset[u], lane, width[u]);
    left = left > kQuantizeBlock ? left - kQuantizeBlock : whole_row;
  }

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    float2 v[kPerLane / 2];
    float amax = kMinAmax;  // a NaN wins, so that it shows in the scale
#pragma unroll
    for (int i = 0; i < kPerLane / 2; ++i) {
      v[i] = pair(chunk[u], i);
      amax = max_nan(max_nan(amax, fabsf(v[i].x)), fabsf(v[i].y));
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      amax = max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
    }
    float scale = divide(amax, kMaxE4M3, 1.f / kMaxE4M3);
    if (p.power_of_two_scale) scale = round_up_to_power_of_two(scale);
    const float inverse = reciprocal(scale);
#pragma unroll
    for (int i = 0; i < kPerLane / 2; ++i) {
      v[i] = {divide(v[i].x, scale, inverse), divide(v[i].y, scale, inverse)};
    }
    const uint2 codes = {to_e4m3(v[0], v[1]), to_e4m3(v[2], v[3])};
    store<kVector>(p.q + start + offset[u], lane, width[u], codes);
    if (lane == 0 && u < blocks) p.scale[first + u] = scale;
  }
}

template <typename T>
cudaError_t launch(const QuantizeParams& p, cudaStream_t stream) {
  const int64_t blocks = p.rows * ceil_div(p.cols, int64_t{kQuantizeBlock});
  const int64_t grid = ceil_div(blocks, int64_t{kBlocksPerCta});
  const auto address = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.q);
  const bool vector = p.cols % kPerLane == 0 && address % 16 == 0;
  return launch_blocks(vector ? quantize_kernel<T, true> : quantize_kernel<T, false>, grid,
                       kThreads, 0, stream, p);
}

}  // namespace

cudaError_t launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return cudaSuccess;
  switch (p.dtype) {
    case DType::kBF16:
      return launch<__nv_bfloat16>(p, stream);
    case DType::kF16:
      return launch<__half>(p, stream);
    case DType::kF32:
      return launch<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa
