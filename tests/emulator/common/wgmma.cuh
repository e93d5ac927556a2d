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

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::wait_groups(kPending);
}
template <int kN>
void wgmma_pin(float (&)[kN]) {}

namespace detail {
template <int kN>
void issue(float (&d)[kN], uint64_t a, uint64_t b, bool accumulate, bool a_mn, bool b_mn) {
  emulator::self().open.push_back(
      {d, 2 * kN, 16, false, a_mn, b_mn, accumulate, a, b, {0, 0, 0, 0}});
}
template <int kN>
void issue(float (&d)[kN], const uint32_t (&a)[4], uint64_t b, bool accumulate, bool b_mn) {
  emulator::self().open.push_back(
      {d, 2 * kN, 16, true, false, b_mn, accumulate, 0, b, {a[0], a[1], a[2], a[3]}});
}
}  // namespace detail

inline void wgmma_m64n64k16(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  detail::issue(d, a, b, accumulate, false, false);
}
inline void wgmma_m64n64k16(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  detail::issue(d, a, b, accumulate, false);
}
inline void wgmma_m64n256k16_mn(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  detail::issue(d, a, b, accumulate, false, true);
}
inline void wgmma_m64n256k16_mn(float (&d)[128], const uint32_t (&a)[4], uint64_t b,
                                bool accumulate) {
  detail::issue(d, a, b, accumulate, true);
}
inline void wgmma_m64n64k16_mn(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                               bool accumulate) {
  detail::issue(d, a, b, accumulate, true);
}
inline void wgmma_m64n128k16_mn(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                bool accumulate) {
  detail::issue(d, a, b, accumulate, true);
}
inline void wgmma_m64n64k16_mn_mn(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  detail::issue(d, a, b, accumulate, true, true);
}
inline void wgmma_m64n256k16_mn_mn(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  detail::issue(d, a, b, accumulate, true, true);
}

}  // namespace jax_dsa
