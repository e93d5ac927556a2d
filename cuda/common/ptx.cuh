// Wrappers of the sm_90 instructions that the kernels share. This header includes all of them
// except wgmma, TMA, clusters and mma.sync, which have headers of their own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/address.cuh"
#include "common/barrier.cuh"
#include "common/convert.cuh"
#include "common/copy.cuh"

namespace jax_dsa {

// Returns `x`, which must be the same in all lanes, in a uniform register. It is a shuffle from
// lane 0, so that ptxas keeps the value and does not recompute it at each use.
template <typename T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(~0u, x, 0);
}

// Returns `x` as a value that the compiler cannot recompute. What depends on it is computed after
// this point.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  uint32_t y;
  asm volatile("mov.u32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Returns 1 in one-dimensional grids, without the assembler knowing the value.
__device__ __forceinline__ uint32_t opaque_one() {
  uint32_t one;
  asm("mov.u32 %0, %%nctaid.y;" : "=r"(one));
  return one;
}

// Returns 1, without the assembler knowing the value or that all threads have the same.
__device__ __forceinline__ uint32_t opaque_one_of_thread() {
  uint32_t lane_bit;
  asm("mov.u32 %0, %%lanemask_eq;" : "=r"(lane_bit));
  return __popc(lane_bit);
}

// Returns threadIdx.x. It is read at this point, so that values derived from it do not occupy
// registers earlier.
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Returns for each lane of a warp the sum of `x` over the lanes up to and including it.
template <typename Int>
__device__ __forceinline__ Int inclusive_scan(Int x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    if constexpr (sizeof(Int) == 4) {
      asm volatile(
          "{\n"
          ".reg .pred has;\n"
          ".reg .s32 other;\n"
          "shfl.sync.up.b32 other|has, %0, %1, 0, 0xffffffff;\n"
          "@has add.s32 %0, %0, other;\n"
          "}\n"
          : "+r"(x)
          : "r"(d));
    } else {
      const Int other = __shfl_up_sync(~0u, x, d);
      if (static_cast<int>(threadIdx.x % 32) >= d) x += other;
    }
  }
  return x;
}

// Changes the number of registers per thread of a warpgroup; see registers_fit in common/limits.h.
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace jax_dsa
