// cuda/common/wgmma_rows.cuh for the emulator.
#pragma once

#include "common/wgmma.cuh"

namespace jax_dsa {

template <int kRowBytes>
uint64_t k_major_rows_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return kSwizzle << 62 | uint64_t{kRowBytes * 8 >> 4} << 32 | uint64_t{1} << 16 |
         (address & 0x3ffff) >> 4;
}

template <int kN>
void wgmma_bf16(float (&d)[kN], uint64_t a, uint64_t b, bool accumulate) {
  detail::issue(d, a, b, accumulate, false, false);
}
template <int kN>
void wgmma_e4m3(float (&d)[kN], uint64_t a, uint64_t b, bool accumulate) {
  detail::issue(d, a, b, accumulate, false, false);
  emulator::self().open.back().k = 32;
}

}  // namespace jax_dsa
