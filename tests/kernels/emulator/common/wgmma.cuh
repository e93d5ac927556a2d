// cuda/common/wgmma.cuh for the emulator.
#pragma once

#include <cstdint>

#include "common/tile.cuh"
#include "common/types.h"
#include "emulator.h"

namespace jax_dsa {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::wait_groups(kPending);
}
template <int kN>
void wgmma_pin(float (&)[kN]) {}
template <int kN, int kM>
void wgmma_pin(uint32_t (&)[kN][kM]) {}
template <int kN>
void wgmma_forget(float (&d)[kN]) {
  for (float& x : d) x = NAN;
}

enum Major { kKMajor = 0, kMNMajor = 1 };

template <DType kType, Major kA, Major kB, int kD>
void wgmma_16(float (&d)[kD], uint64_t a, uint64_t b, bool accumulate) {
  emulator::self().open.push_back({d,
                                   2 * kD,
                                   16,
                                   kType == DType::kF16,
                                   false,
                                   kA == kMNMajor,
                                   kB == kMNMajor,
                                   accumulate,
                                   a,
                                   b,
                                   {0, 0, 0, 0}});
}
template <DType kType, Major kB, int kD>
void wgmma_16(float (&d)[kD], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  emulator::self().open.push_back({d,
                                   2 * kD,
                                   16,
                                   kType == DType::kF16,
                                   true,
                                   false,
                                   kB == kMNMajor,
                                   accumulate,
                                   0,
                                   b,
                                   {a[0], a[1], a[2], a[3]}});
}
template <Major kA, Major kB, int kD>
void wgmma_bf16(float (&d)[kD], uint64_t a, uint64_t b, bool accumulate) {
  wgmma_16<DType::kBF16, kA, kB>(d, a, b, accumulate);
}
template <Major kB, int kD>
void wgmma_bf16(float (&d)[kD], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  wgmma_16<DType::kBF16, kB>(d, a, b, accumulate);
}
template <int kD>
void wgmma_e4m3(float (&d)[kD], uint64_t a, uint64_t b, bool accumulate) {
  emulator::self().open.push_back(
      {d, 2 * kD, 32, false, false, false, false, accumulate, a, b, {0, 0, 0, 0}});
}

}  // namespace jax_dsa
