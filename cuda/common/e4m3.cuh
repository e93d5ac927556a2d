// Conversions between e4m3 and float32 or f16 by integer arithmetic, for GPUs before sm_89, which
// have no instruction for them. An e4m3 value has 1 sign bit, 4 exponent bits (bias 7) and 3 bits
// of the mantissa. Its largest magnitude is 448, and 0x7f is NaN; there are no infinities.
#pragma once

#include <cstdint>

namespace jax_dsa {

// Returns the value of a code, exactly.
__device__ __forceinline__ float float_of_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7f;
  // The bits of the magnitude, shifted to the place of a float's bits, are the value times 2^-120,
  // because the biases differ by 120. This also holds for subnormal codes.
  const float scaled = __uint_as_float(magnitude << 20);
  const float value = magnitude == 0x7f ? __uint_as_float(0x7fc00000u) : scaled * 0x1p120f;
  return __uint_as_float(__float_as_uint(value) | (code & 0x80) << 24);
}

// Returns the code of the nearest value. Of two values at the same distance it is the one whose
// code is even. Magnitudes above 448 give 448, and NaN gives NaN.
__device__ __forceinline__ uint32_t e4m3_of_float(float x) {
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
  // Normal values: round the mantissa to 3 bits, and change the bias. A carry goes to the exponent.
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  // Below 2^-6, values are multiples of 2^-9. At 2^14 this is the distance between two floats, so
  // that the sum is rounded to it.
  const uint32_t subnormal =
      __float_as_uint(__uint_as_float(magnitude) + 0x1p14f) - __float_as_uint(0x1p14f);
  uint32_t code = magnitude < __float_as_uint(0x1p-6f) ? subnormal : normal;
  if (magnitude > __float_as_uint(448.f)) code = magnitude > 0x7f800000u ? 0x7f : 0x7e;
  return code | (bits >> 24 & 0x80);
}

// Converts four values, the first to the lowest byte.
__device__ __forceinline__ uint32_t e4m3_of_floats(float a, float b, float c, float d) {
  return e4m3_of_float(a) | e4m3_of_float(b) << 8 | e4m3_of_float(c) << 16 | e4m3_of_float(d) << 24;
}

// Returns the values of codes 2 * kHalf (in the lower half) and 2 * kHalf + 1 of `packed` as f16,
// times 2^-8. NaN gives 1.875, which no other code does.
template <int kHalf>
__device__ __forceinline__ uint32_t scaled_f16_of_e4m3(uint32_t packed) {
  // The bits of the magnitude move to the place of an f16's bits. The biases differ by 8.
  const uint32_t codes = __byte_perm(packed, 0, kHalf == 0 ? 0x1404 : 0x3424);  // in upper bytes
  return (codes >> 1 & 0x3f803f80u) | (codes & 0x80008000u);
}

}  // namespace jax_dsa
