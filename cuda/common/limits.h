// Resources of Hopper GPUs (compute capability 9.0).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

inline constexpr int kMaxSms = 132;  // the largest number of SMs of any of them

// The most CTAs of a cluster, and so many that every GPU with clusters has room for.
inline constexpr int kMaxClusterSize = 16;
inline constexpr int kPortableClusterSize = 8;

// Resources of one SM.
inline constexpr int kMaxSharedBytes = 227 * 1024;  // available to one CTA
inline constexpr int kReservedSharedBytes = 1024;   // used by the system for each CTA
inline constexpr int kRegisters = 64 * 1024;

// The smallest shared memory that is available to one CTA on any GPU since sm_80.
inline constexpr int kMinSharedBytes = 99 * 1024;

// Returns whether an SM can run `blocks` CTAs with `bytes` of shared memory each at the same time.
constexpr bool shared_memory_fits(int blocks, int64_t bytes) {
  return blocks * (bytes + kReservedSharedBytes) <= kMaxSharedBytes + kReservedSharedBytes;
}

// Returns whether an SM can run `blocks` CTAs at the same time, each with `consumers` warpgroups of
// `consumer` registers per thread, one producer warpgroup of `producer` registers per thread and,
// unless `other` is 0, one more of `other` registers. setmaxnreg redistributes the registers that
// the CTA was launched with. It blocks forever if they do not suffice.
__host__ __device__ constexpr bool registers_fit(int blocks, int consumers, int consumer,
                                                 int producer, int other = 0) {
  const int warpgroups = consumers + 1 + (other > 0);
  const int launched = kRegisters / (128 * warpgroups * blocks) / 8 * 8;
  return consumer % 8 == 0 && consumer <= 256 && producer % 8 == 0 && producer >= 24 &&
         other % 8 == 0 && consumers * consumer + producer + other <= warpgroups * launched;
}

}  // namespace jax_dsa
