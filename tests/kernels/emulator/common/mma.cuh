// cuda/common/mma.cuh for the emulator.
#pragma once

#include <cstdint>

#include "common/e4m3.cuh"
#include "common/types.h"
#include "emulator.h"

namespace jax_dsa {

// Multiplies 8 * kHalves columns of a.
template <DType kType, int kHalves>
void multiply(float (&d)[4], const uint32_t (&a)[2 * kHalves], const uint32_t (&b)[kHalves]) {
  const auto value = [](uint64_t packed, int half) {
    const auto bits = static_cast<uint32_t>(packed);
    return kType == DType::kBF16 ? emulator::bf16_of(bits, half) : emulator::f16_of(bits, half);
  };
  const int lane = emulator::self().thread % 32;
  // The rows of a and the columns of b that this lane's elements of d need.
  float rows[2][8 * kHalves], columns[2][8 * kHalves];
  for (int i = 0; i < 2 * kHalves; ++i) {
    const uint64_t* all = emulator::exchange(a[i]);
    for (int k = 0; k < 8; ++k) {
      rows[i % 2][i / 2 * 8 + k] = value(all[lane / 4 * 4 + k / 2], k % 2);
    }
  }
  for (int i = 0; i < kHalves; ++i) {
    const uint64_t* all = emulator::exchange(b[i]);
    for (int column = 0; column < 2; ++column) {
      for (int k = 0; k < 8; ++k) {
        columns[column][i * 8 + k] = value(all[(lane % 4 * 2 + column) * 4 + k / 2], k % 2);
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int k = 0; k < 8 * kHalves; ++k) sum += rows[i / 2][k] * columns[i % 2][k];
    d[i] += sum;
  }
}

template <DType kType>
void mma_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<kType, 2>(d, a, {b0, b1});
}

template <DType kType>
void mma_8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  multiply<kType, 1>(d, a, {b});
}

// A program defines EMULATOR_E4M3_MMA to test kernels as they are on GPUs that multiply e4m3.
#ifdef EMULATOR_E4M3_MMA
inline constexpr bool kHasE4m3Mma = true;
#else
inline constexpr bool kHasE4m3Mma = false;
#endif

inline void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = emulator::self().thread % 32;
  const uint32_t b[2] = {b0, b1};
  float rows[2][32], columns[2][32];  // what this lane's elements of d need
  const auto unpack = [](uint64_t packed, float* to) {
    for (int i = 0; i < 4; ++i) to[i] = float_of_e4m3(packed >> (8 * i) & 0xff);
  };
  for (int i = 0; i < 4; ++i) {
    const uint64_t* all = emulator::exchange(a[i]);
    for (int k = 0; k < 4; ++k) unpack(all[lane / 4 * 4 + k], &rows[i % 2][i / 2 * 16 + k * 4]);
  }
  for (int i = 0; i < 2; ++i) {
    const uint64_t* all = emulator::exchange(b[i]);
    for (int column = 0; column < 2; ++column) {
      for (int k = 0; k < 4; ++k) {
        unpack(all[(lane % 4 * 2 + column) * 4 + k], &columns[column][i * 16 + k * 4]);
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int k = 0; k < 32; ++k) sum += rows[i / 2][k] * columns[i % 2][k];
    d[i] += sum;
  }
}

}  // namespace jax_dsa
