// The values of FP8 records as bf16: e4m3 * scale, rounded to nearest.
//
// An e4m3 code's exponent and mantissa, moved to where bf16 has its own, mean 2^-120 times the
// value, subnormals included; a packed multiplication by 2^120 * scale makes up for it, and is
// exact where the scale is a power of two (but for the rounding of results below 2^-126). The rest
// takes the way through f32: scales that are no powers of two, or outside 2^-126 .. 2^7, where the
// factor would not be finite, and codes for NaN, whose bits would become 480.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"

namespace jax_dsa::mla {

// Whether `scale` may become a factor.
__device__ __forceinline__ bool is_plain_scale(float scale) {
  constexpr uint32_t kLeast = 1u << 23, kBeyond = (127 + 8) << 23;
  const uint32_t bits = __float_as_uint(scale);
  return (bits & 0x7fffff) == 0 && bits - kLeast < kBeyond - kLeast;
}

// Two times 2^120 * scale in bf16.
__device__ __forceinline__ uint32_t scale_factor(float scale) {
  const uint32_t factor = __float_as_uint(scale) + (120u << 23);
  return factor | factor >> 16;
}

// Of sums and shifts. Where the assembler does not know them, it multiplies, and multiplications
// have a pipe of their own, while integer sums, shifts and logic share the one that unpacking waits
// for.
struct Factors {
  uint32_t one = 1, sixteen = 16;

  __device__ static Factors opaque() { return {opaque_one(), opaque_one() << 4}; }
};

// In each byte's top bit of the result: whether a word's first NaN, code 0x7f or 0xff, is there;
// behind it, anything. Adding one to each code changes the top bit of the first that is NaN, and of
// none if none is.
__device__ __forceinline__ uint32_t nan_bits_e4m3(uint32_t codes, Factors factors) {
  return (codes * factors.one + 0x01010101) ^ codes;
}

// Whether one of a thread's codes is NaN, by the union of their nan_bits_e4m3.
__device__ __forceinline__ bool any_nan(uint32_t bits) { return bits & 0x80808080; }

// The values of a word's codes, without NaN.
__device__ __forceinline__ void plain_values(uint32_t codes, uint32_t factor, Factors factors,
                                             uint32_t& low, uint32_t& high) {
  low = multiply_bf16(sign_extended_bytes<0>(codes) * factors.sixteen & 0x87f087f0, factor);
  high = multiply_bf16(sign_extended_bytes<1>(codes) * factors.sixteen & 0x87f087f0, factor);
}

// The values of any word's codes by any scale.
__device__ __forceinline__ void any_values(uint32_t codes, float scale, uint32_t& low,
                                           uint32_t& high) {
  float v[4];
  unpack_e4m3(codes, v);
  low = pack_bf16(v[0] * scale, v[1] * scale);
  high = pack_bf16(v[2] * scale, v[3] * scale);
}

// 32 values; `store` gets the number and the values of each eight.
template <typename Store>
__device__ __forceinline__ void unpack_values(const uint32_t (&codes)[8], float scale,
                                              Store store) {
  constexpr Factors factors;
  const auto has_nan = [&] {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= nan_bits_e4m3(codes[i], factors);
    return any_nan(bits);
  };
  uint32_t y[4];
  if (is_plain_scale(scale) && !has_nan()) {
    const uint32_t factor = scale_factor(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      plain_values(codes[2 * i], factor, factors, y[0], y[1]);
      plain_values(codes[2 * i + 1], factor, factors, y[2], y[3]);
      store(i, y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      any_values(codes[2 * i], scale, y[0], y[1]);
      any_values(codes[2 * i + 1], scale, y[2], y[3]);
      store(i, y);
    }
  }
}

}  // namespace jax_dsa::mla
