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

namespace jax_dsa::sparse_mla {

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

// Whether one of 32 codes is NaN, 0x7f or 0xff: adding one to each changes the top bit of a word's
// first that is, and of none if none is.
__device__ __forceinline__ bool any_nan_e4m3(const uint32_t (&codes)[8]) {
  uint32_t changed = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) changed |= (codes[i] + 0x01010101) ^ codes[i];
  return changed & 0x80808080;
}

// Values 2 * kHalf and 2 * kHalf + 1 of four, without NaN.
template <int kHalf>
__device__ __forceinline__ uint32_t plain_values(uint32_t codes, uint32_t factor) {
  return multiply_bf16(sign_extended_bytes<kHalf>(codes) << 4 & 0x87f087f0, factor);
}

// 32 values; `store` gets the number and the values of each eight.
template <typename Store>
__device__ __forceinline__ void unpack_values(const uint32_t (&codes)[8], float scale,
                                              Store store) {
  uint32_t y[4];
  if (is_plain_scale(scale) && !any_nan_e4m3(codes)) {
    const uint32_t factor = scale_factor(scale);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      y[0] = plain_values<0>(codes[i], factor);
      y[1] = plain_values<1>(codes[i], factor);
      y[2] = plain_values<0>(codes[i + 1], factor);
      y[3] = plain_values<1>(codes[i + 1], factor);
      store(i / 2, y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float v[4];
      unpack_e4m3(codes[i], v);
      y[i % 2 * 2] = pack_bf16(v[0] * scale, v[1] * scale);
      y[i % 2 * 2 + 1] = pack_bf16(v[2] * scale, v[3] * scale);
      if (i % 2 == 1) store(i / 2, y);
    }
  }
}

}  // namespace jax_dsa::sparse_mla
