// TMA: copies of boxes of a tensor into shared memory, with zeros for what lies outside the tensor.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/ptx.cuh"

namespace jax_dsa {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at coordinates (x, y, z[, w]), innermost first; completes on `barrier`.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// With a policy of `l2_policy_*`.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x,
                                         int y, int z, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x,
                                         int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// The box at these coordinates from shared memory, as far as there is a tensor; in this thread's
// open group of bulk stores.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y,
                                          int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(smem_address(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y,
                                          int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(smem_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// The box to the same place in all blocks of the cluster whose bits are in `ranks`; completes on
// the same barrier in each of them.
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap* map,
                                                   uint64_t* barrier, uint16_t ranks, int x, int y,
                                                   int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(ranks)
      : "memory");
}

}  // namespace jax_dsa
