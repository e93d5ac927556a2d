// Synchronization: mbarriers, named barriers, proxy fences, counters in global memory that CTAs
// share, and programmatic dependent launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/address.cuh"

namespace jax_dsa {

// ---- mbarriers ----------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals)
               : "memory");
}

// Makes initialized mbarriers visible to the async proxy and to the cluster. A CTA barrier must
// still follow. GPUs before sm_90 have neither.
__device__ __forceinline__ void mbarrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Counts as `arrivals` arrivals.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Arrives, and adds `bytes` to what copies must complete before the phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Arrives at the same mbarrier of CTA `rank` of the cluster. Use it only to announce that this
// thread's warp has read something into registers. `release.cluster` would also order its writes,
// but costs a fence of all memory, about a microsecond.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// Waits until the phase with the given parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// ---- named barriers and fences ------------------------------------------------------------------

template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Synchronizes, and returns whether `x` is true in any thread.
template <int kThreads>
__device__ __forceinline__ bool named_barrier_any(int id, bool x) {
  int any;
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.b32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine;\nselp.b32 %0, 1, 0, any;\n}\n"
      : "=r"(any)
      : "r"(id), "n"(kThreads), "r"(int{x})
      : "memory");
  return any;
}

template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Orders ordinary shared-memory accesses with those of wgmma and TMA: this thread's, and through a
// barrier also those of other threads.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- counters in global memory ------------------------------------------------------------------

// Adds 1 to the counter after everything that this thread has written or has seen written,
// including bulk stores unless !kBulk.
template <bool kBulk = true>
__device__ __forceinline__ void counter_add(uint32_t* counter) {
  if constexpr (kBulk) asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits until the counter is at least `count`. Later reads of this thread, including bulk loads
// unless !kBulk, see what was written before the additions.
template <bool kBulk = true>
__device__ __forceinline__ void counter_wait(const uint32_t* counter, uint32_t count) {
  uint32_t x;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  } while (x < count);
  if constexpr (kBulk) asm volatile("fence.proxy.async;" ::: "memory");
}

// ---- programmatic dependent launch; see launch_pdl in common/launch.cuh -------------------------
// In code for GPUs before sm_90 these functions do nothing, and launch_pdl is an ordinary launch.

__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace jax_dsa
