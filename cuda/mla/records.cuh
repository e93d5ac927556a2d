// The values of FP8 records as bf16: e4m3 * scale, rounded to nearest.
//
// The exponent and mantissa of an e4m3 code, shifted to where bf16 has its own, are 2^-120 times
// the value, subnormals included. A packed multiplication by 2^120 * scale makes up for it. It is
// exact where the scale is a power of two, except that results below 2^-126 are rounded. Everything
// else is computed in float32: scales that are not powers of two or lie outside 2^-126 .. 2^7,
// where the factor would not be finite, and NaN codes, whose bits would become 480.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"

namespace jax_dsa::mla {

// Whether `scale` is a power of two in the range of the fast path.
__device__ __forceinline__ bool is_power_of_two_scale(float scale) {
  constexpr uint32_t kLeast = 1u << 23, kBeyond = (127 + 8) << 23;
  const uint32_t bits = __float_as_uint(scale);
  return (bits & 0x7fffff) == 0 && bits - kLeast < kBeyond - kLeast;
}

// Returns 2^120 * scale in bf16, twice.
__device__ __forceinline__ uint32_t scale_factor(float scale) {
  const uint32_t factor = __float_as_uint(scale) + (120u << 23);
  return factor | factor >> 16;
}

// Returns the scale that a byte of a page record stands for.
__device__ __forceinline__ float page_record_scale(uint32_t byte) {
  const uint32_t bits = byte == 0 ? 1u << 22 : byte == 255 ? 0x7fc00000u : byte << 23;
  return __uint_as_float(bits);
}

// Whether the scale is in the range of the fast path, which is 2^-126 .. 2^7.
__device__ __forceinline__ bool is_fast_page_record_scale(uint32_t byte) { return byte - 1 < 134; }

// Returns 2^120 times such a scale in bf16, twice.
__device__ __forceinline__ uint32_t page_record_factor(uint32_t byte) {
  return byte * 0x00800080u + 120 * 0x00800080u;
}

// Factors that turn sums and shifts into multiplications. The assembler emits multiplications only
// if it does not know the factors. Multiplications have a pipe of their own, while integer sums,
// shifts and logic share the pipe that limits unpacking.
struct OpaqueFactors {
  uint32_t one = 1, sixteen = 16;

  // A multiplication cannot have a uniform register and a constant, so `one` is not uniform.
  __device__ static OpaqueFactors opaque() { return {opaque_one_of_thread(), opaque_one() << 4}; }
};

// Sets a byte's top bit if it is the word's first NaN code (0x7f or 0xff). The bits above that byte
// are undefined. Adding one to each code changes the top bit of the first NaN code, and of no code
// if there is none.
__device__ __forceinline__ uint32_t nan_bits_e4m3(uint32_t codes, OpaqueFactors factors) {
  return (codes * factors.one + 0x01010101) ^ codes;
}

// Whether one of a thread's codes is NaN, given the union of their nan_bits_e4m3.
__device__ __forceinline__ bool any_nan(uint32_t bits) { return bits & 0x80808080; }

// Converts a word's codes, none of which is NaN, with a power-of-two scale.
__device__ __forceinline__ void values_by_power_of_two(uint32_t codes, uint32_t factor,
                                                       OpaqueFactors factors, uint32_t& low,
                                                       uint32_t& high) {
  low = multiply_bf16(sign_extended_bytes<0>(codes) * factors.sixteen & 0x87f087f0, factor);
  high = multiply_bf16(sign_extended_bytes<1>(codes) * factors.sixteen & 0x87f087f0, factor);
}

// Converts any codes with any scale.
__device__ __forceinline__ void values_by_any_scale(uint32_t codes, float scale, uint32_t& low,
                                                    uint32_t& high) {
  float v[4];
  unpack_e4m3(codes, v);
  low = pack_bf16(v[0] * scale, v[1] * scale);
  high = pack_bf16(v[2] * scale, v[3] * scale);
}

// Converts 32 codes. Calls store(i, values) for each group of eight values.
template <typename Store>
__device__ __forceinline__ void unpack_values(const uint32_t (&codes)[8], float scale,
                                              Store store) {
  constexpr OpaqueFactors factors;
  const auto has_nan = [&] {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= nan_bits_e4m3(codes[i], factors);
    return any_nan(bits);
  };
  uint32_t y[4];
  if (is_power_of_two_scale(scale) && !has_nan()) {
    const uint32_t factor = scale_factor(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values_by_power_of_two(codes[2 * i], factor, factors, y[0], y[1]);
      values_by_power_of_two(codes[2 * i + 1], factor, factors, y[2], y[3]);
      store(i, y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values_by_any_scale(codes[2 * i], scale, y[0], y[1]);
      values_by_any_scale(codes[2 * i + 1], scale, y[2], y[3]);
      store(i, y);
    }
  }
}

}  // namespace jax_dsa::mla
