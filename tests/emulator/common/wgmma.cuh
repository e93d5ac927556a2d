// cuda/common/wgmma.cuh for the emulator.
#pragma once

#include <cstdint>

#include "emulator.h"

namespace jax_dsa {

inline constexpr uint64_t kSwizzle128B = uint64_t{1} << 62;

inline uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  return kSwizzle128B | uint64_t{stride_bytes >> 4} << 32 | uint64_t{leading_bytes >> 4} << 16 |
         (address & 0x3ffff) >> 4;
}
inline uint64_t k_major_descriptor(uint32_t address) { return wgmma_descriptor(address, 16, 1024); }
inline uint64_t mn_major_descriptor(uint32_t address, uint32_t block_bytes) {
  return wgmma_descriptor(address, block_bytes, 1024);
}
template <int kRowBytes>
uint64_t k_major_rows_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return kSwizzle << 62 | uint64_t{kRowBytes * 8 >> 4} << 32 | uint64_t{1} << 16 |
         (address & 0x3ffff) >> 4;
}

inline uint64_t moved(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & ~uint64_t{UINT32_MAX}) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::wait_groups(kPending);
}
template <int kN>
void wgmma_pin(float (&)[kN]) {}

enum Major { kKMajor = 0, kMNMajor = 1 };

template <Major kA, Major kB, int kD>
void wgmma_bf16(float (&d)[kD], uint64_t a, uint64_t b, bool accumulate) {
  emulator::self().open.push_back(
      {d, 2 * kD, 16, false, kA == kMNMajor, kB == kMNMajor, accumulate, a, b, {0, 0, 0, 0}});
}
template <Major kB, int kD>
void wgmma_bf16(float (&d)[kD], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  emulator::self().open.push_back(
      {d, 2 * kD, 16, true, false, kB == kMNMajor, accumulate, 0, b, {a[0], a[1], a[2], a[3]}});
}
template <int kD>
void wgmma_e4m3(float (&d)[kD], uint64_t a, uint64_t b, bool accumulate) {
  emulator::self().open.push_back(
      {d, 2 * kD, 32, false, false, false, accumulate, a, b, {0, 0, 0, 0}});
}

}  // namespace jax_dsa
