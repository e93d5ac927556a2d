// cuda/common/convert.cuh for the emulator.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/e4m3.cuh"
#include "common/types.h"
#include "emulator.h"

namespace jax_dsa {

// ---- arithmetic ---------------------------------------------------------------------------------

inline float exp2_approx(float x) { return std::exp2(x); }

inline float log2_approx(float x) { return std::log2(x); }

inline float2 cosine_and_sine(float turns) {
  const float angle = turns * 6.2831853f;
  return {std::cos(angle), std::sin(angle)};
}

inline float reciprocal_approx(float x) { return 1.f / x; }

inline float max_nan(float a, float b) { return a > b || std::isnan(a) ? a : b; }

// ---- conversions --------------------------------------------------------------------------------

inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat16 x[2] = {__float2bfloat16(low), __float2bfloat16(high)};
  uint32_t packed;
  memcpy(&packed, x, 4);
  return packed;
}

inline uint32_t pack_f16(float low, float high) {
  const _Float16 x[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  uint32_t packed;
  memcpy(&packed, x, 4);
  return packed;
}

template <DType kType>
uint32_t pack_16(float low, float high) {
  return kType == DType::kBF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

inline float2 unpack_bf16(uint32_t packed) {
  return make_float2(emulator::bf16_of(packed, 0), emulator::bf16_of(packed, 1));
}

inline float2 unpack_f16(uint32_t packed) {
  return make_float2(emulator::f16_of(packed, 0), emulator::f16_of(packed, 1));
}

template <DType kType>
float2 unpack_16(uint32_t packed) {
  return kType == DType::kBF16 ? unpack_bf16(packed) : unpack_f16(packed);
}

inline void unpack_e4m3(uint32_t packed, float (&x)[4]) {
  for (int i = 0; i < 4; ++i) x[i] = float_of_e4m3(packed >> (8 * i) & 0xff);
}

inline void unpack_e4m3_f16(uint32_t packed, uint32_t& low, uint32_t& high) {
  const auto unscaled = [](uint32_t scaled) {
    const float2 x = unpack_f16(scaled);
    const auto value = [](float y) { return std::fabs(y) == 1.875f ? NAN : y * 256.f; };
    return pack_f16(value(x.x), value(x.y));
  };
  low = unscaled(scaled_f16_of_e4m3<0>(packed)), high = unscaled(scaled_f16_of_e4m3<1>(packed));
}

inline uint32_t pack_e4m3(float a, float b, float c, float d) { return e4m3_of_floats(a, b, c, d); }

// ---- operations on packed values ----------------------------------------------------------------

inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  const float2 x = unpack_bf16(a), y = unpack_bf16(b);
  return pack_bf16(x.x * y.x, x.y * y.y);
}

inline uint32_t positive_bf16(uint32_t packed) {
  const float2 x = unpack_bf16(packed);
  return (x.x > 0 ? 0xffffu : 0) | (x.y > 0 ? 0xffff0000u : 0);
}

template <int kHalf>
uint32_t spread_top_bits(uint32_t x) {
  const uint32_t low = x >> (16 * kHalf + 7) & 1, high = x >> (16 * kHalf + 15) & 1;
  return low * 0xffffu | high * 0xffff0000u;
}

template <int kHalf>
uint32_t sign_extended_bytes(uint32_t x) {
  const auto of = [&](int i) { return static_cast<uint16_t>(static_cast<int8_t>(x >> (8 * i))); };
  return of(2 * kHalf) | uint32_t{of(2 * kHalf + 1)} << 16;
}

}  // namespace jax_dsa
