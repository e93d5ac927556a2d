// What a Hopper GPU and its SMs have.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

inline constexpr int kMaxSms = 132;  // that any of them has

// Of a SM:
inline constexpr int kMaxSharedBytes = 227 * 1024;  // of a block
inline constexpr int kReservedSharedBytes = 1024;   // of each block, beside its own
inline constexpr int kRegisters = 64 * 1024;

// Whether so many blocks with so much shared memory each run at a time.
constexpr bool shared_memory_fits(int blocks, int64_t bytes) {
  return blocks * (bytes + kReservedSharedBytes) <= kMaxSharedBytes + kReservedSharedBytes;
}

// Whether a block's `consumers` warpgroups and its producer can have so many registers a thread,
// with so many blocks at a time. Registers move within what the block was launched with; setmaxnreg
// waits for ever for more.
__host__ __device__ constexpr bool registers_fit(int blocks, int consumers, int consumer,
                                                 int producer) {
  const int warpgroups = consumers + 1;
  const int launched = kRegisters / (128 * warpgroups * blocks) / 8 * 8;
  return consumer % 8 == 0 && consumer <= 256 && producer % 8 == 0 && producer >= 24 &&
         consumers * consumer + producer <= warpgroups * launched;
}

}  // namespace jax_dsa
