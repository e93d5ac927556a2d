// cuda/common/address.cuh for the emulator.
#pragma once

#include <cstdint>

#include "emulator.h"

namespace jax_dsa {

inline uint32_t smem_address(const void* p) { return emulator::shared_offset(p); }

template <typename T>
T& dynamic_shared() {
  static_assert(sizeof(T) <= emulator::kSharedBytes);
  return *reinterpret_cast<T*>(emulator::self().block->shared);
}

inline uint32_t whole_sum(uint32_t to, uint32_t offset) { return to + offset; }

}  // namespace jax_dsa
