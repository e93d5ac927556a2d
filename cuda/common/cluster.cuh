// Thread block clusters: rank, barrier, and the shared memory of other CTAs.
#pragma once

#include <cstdint>

namespace jax_dsa {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}

// Waits for all CTAs of the cluster and orders their shared-memory accesses. It costs each warp a
// fence of all memory, so use it sparingly.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Waits for all CTAs of the cluster, but does not order what they write.
__device__ __forceinline__ void cluster_join() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Returns the address, in the shared memory of CTA `rank`, of the object that is at `p` in this
// CTA.
template <typename T>
__device__ __forceinline__ T* cluster_peer(T* p, int rank) {
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(there);
}

}  // namespace jax_dsa
