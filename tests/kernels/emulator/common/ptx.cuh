// cuda/common/ptx.cuh for the emulator.
#pragma once

#include <cstdint>

#include "common/address.cuh"
#include "common/barrier.cuh"
#include "common/convert.cuh"
#include "common/copy.cuh"
#include "emulator.h"

namespace jax_dsa {

template <typename T>
T uniform(T x) {
  const T first = __shfl_sync(~0u, x, 0);
  if (first != x) emulator::fail("a uniform value differs between lanes");
  return first;
}

inline uint32_t opaque(uint32_t x) { return x; }

inline uint32_t opaque_one() { return 1; }
inline uint32_t opaque_one_of_thread() { return 1; }

inline int thread_index() { return static_cast<int>(emulator::self().thread); }

template <typename Int>
Int inclusive_scan(Int x) {
  const uint64_t* all = emulator::exchange(static_cast<uint64_t>(x));
  Int sum = 0;
  for (unsigned i = 0; i <= emulator::self().thread % 32; ++i) sum += static_cast<Int>(all[i]);
  return sum;
}

template <int kRegisters>
void raise_registers() {}

template <int kRegisters>
void lower_registers() {}

}  // namespace jax_dsa
