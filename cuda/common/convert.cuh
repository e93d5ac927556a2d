// Arithmetic and conversions that have instructions of their own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/e4m3.cuh"
#include "common/types.h"

namespace jax_dsa {

// ---- arithmetic ---------------------------------------------------------------------------------

// Returns 2^x; 0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns log2(x), also for denormals.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns the cosine and the sine of an angle in turns, to within 2^-20. The angle is at most half
// a turn.
__device__ __forceinline__ float2 cosine_and_sine(float turns) {
  const float angle = turns * 6.2831853f;
  float2 y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y.x) : "f"(angle));
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y.y) : "f"(angle));
  return y;
}

// Returns 1 / x to within one ulp.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns the maximum, or NaN if an argument is NaN. relu needs this.
__device__ __forceinline__ float max_nan(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

// ---- conversions --------------------------------------------------------------------------------

// Returns two floats as bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Returns two floats as f16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <DType kType>
__device__ __forceinline__ uint32_t pack_16(float low, float high) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  return kType == DType::kBF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}

__device__ __forceinline__ float2 unpack_f16(uint32_t packed) {
  float2 x;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
      : "=f"(x.x), "=f"(x.y)
      : "r"(packed));
  return x;
}

template <DType kType>
__device__ __forceinline__ float2 unpack_16(uint32_t packed) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  return kType == DType::kBF16 ? unpack_bf16(packed) : unpack_f16(packed);
}

// Converts four e4m3 values exactly.
__device__ __forceinline__ void unpack_e4m3(uint32_t packed, float (&x)[4]) {
#if __CUDA_ARCH__ < 890
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = float_of_e4m3(packed >> (8 * i) & 0xff);
#else
  asm("{\n.reg .b16 low, high, a, b, c, d;\n.reg .b32 ab, cd;\n"
      "mov.b32 {low, high}, %4;\n"
      "cvt.rn.f16x2.e4m3x2 ab, low;\ncvt.rn.f16x2.e4m3x2 cd, high;\n"
      "mov.b32 {a, b}, ab;\nmov.b32 {c, d}, cd;\n"
      "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}\n"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "r"(packed));
#endif
}

// Converts four e4m3 values to f16 exactly, the first two to `low`.
__device__ __forceinline__ void unpack_e4m3_f16(uint32_t packed, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ < 890
  // The product of the scaled value with 37376 is infinite for NaN only, and 0 times it is NaN.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t& x = i == 0 ? low : high;
    asm("{\n.reg .b32 y, z;\n"
        "mul.rn.f16x2 y, %1, %2;\nmul.rn.f16x2 z, %1, %3;\nfma.rn.f16x2 %0, y, %4, z;\n}\n"
        : "=r"(x)
        : "r"(i == 0 ? scaled_f16_of_e4m3<0>(packed) : scaled_f16_of_e4m3<1>(packed)),
          "r"(0x78907890u), "r"(0x5c005c00u), "r"(0));
  }
#else
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(packed));
#endif
}

// Rounds four floats to e4m3, the first to the lowest byte. Magnitudes above 448 give 448.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
#if __CUDA_ARCH__ < 890
  return e4m3_of_floats(a, b, c, d);
#else
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
#endif
}

// ---- operations on packed values ----------------------------------------------------------------

// Multiplies two pairs of bf16, including subnormals.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0
#endif
  return product;
}

// Returns 0xffff in place of each of two bf16 values that is > 0, else 0.
__device__ __forceinline__ uint32_t positive_bf16(uint32_t packed) {
#if __CUDA_ARCH__ >= 900
  uint32_t mask;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(packed), "r"(0));
  return mask;
#else
  const float2 x = unpack_bf16(packed);
  return (x.x > 0.f ? 0xffffu : 0) | (x.y > 0.f ? 0xffff0000u : 0);
#endif
}

// Returns the top bits of bytes 2 * kHalf (in the lower half) and 2 * kHalf + 1 of x, each repeated
// 16 times.
template <int kHalf>
__device__ __forceinline__ uint32_t spread_top_bits(uint32_t x) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(kHalf == 0 ? 0x9988 : 0xbbaa));
  return y;
}

// Returns bytes 2 * kHalf (in the lower half) and 2 * kHalf + 1 of x, each sign-extended to 16
// bits.
template <int kHalf>
__device__ __forceinline__ uint32_t sign_extended_bytes(uint32_t x) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(kHalf == 0 ? 0x9180 : 0xb3a2));
  return y;
}

}  // namespace jax_dsa
