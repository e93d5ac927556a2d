// What a multiprocessor of Hopper has for its blocks.
#pragma once

#include <cstdint>

namespace jax_dsa {

inline constexpr int kMaxSharedBytes = 227 * 1024;  // of a block
inline constexpr int kReservedSharedBytes = 1024;   // of each block, beside its own

// Whether so many blocks with so much shared memory each run at a time.
constexpr bool shared_memory_fits(int blocks, int64_t bytes) {
  return blocks * (bytes + kReservedSharedBytes) <= kMaxSharedBytes + kReservedSharedBytes;
}

}  // namespace jax_dsa
