// TMA copies of boxes between a tensor and shared memory. A load fills elements outside of the
// tensor with zeros; a store skips them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/ptx.cuh"

namespace jax_dsa {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at coordinates (x, y, z[, w]), innermost first. The bytes count towards the phase
// of `barrier`.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Loads with an L2 policy; see common/copy.cuh.
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

// Stores the box at these coordinates, in this thread's open group of bulk stores.
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

// Loads the box to the same address in every CTA of the cluster whose bit is set in `ranks`. The
// bytes count towards the same mbarrier in each of them.
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
