// Thin wrappers of the sm_90 instructions that the kernels share: mbarriers, cp.async, named
// barriers, register budgets. wgmma has a header of its own.
#pragma once

#include <cstdint>

namespace jax_dsa {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The block's dynamic shared memory.
template <typename T>
__device__ __forceinline__ T& dynamic_shared() {
  extern __shared__ uint8_t raw[];
  return *reinterpret_cast<T*>(raw);
}

// ---- mbarrier ----------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the async proxy and the cluster; a block barrier must still
// follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Waits until the phase of the given parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// ---- cp.async ----------------------------------------------------------------------------------

// 16 bytes from global to shared memory, zeros instead if !valid (then `from` is not read).
// `policy` is of `l2_policy_*`; the L2 fetches the whole 256-byte neighbourhood.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid,
                                            uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(to),
      "l"(from), "r"(valid ? 16 : 0), "l"(policy)
      : "memory");
}

// One of the barrier's arrivals, made when all cp.async of this thread so far have landed.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

__device__ __forceinline__ uint64_t l2_policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t l2_policy_evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Asks for `bytes` (a multiple of 16) from an address that is one, too, to be in the L2 soon.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// *from, or `otherwise` if !valid; issued here, however late its use. For data that no one writes
// meanwhile.
__device__ __forceinline__ int load_now(const int* from, bool valid, int otherwise) {
  int x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, %3;\n"
      "@p ld.global.nc.b32 %0, [%1];\n}\n"
      : "=r"(x)
      : "l"(from), "r"(int{valid}), "r"(otherwise));
  return x;
}

// 16 bytes to global memory if `valid`, not to be kept in caches.
__device__ __forceinline__ void store_16(void* to, const uint32_t (&x)[4], bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(to),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(int{valid})
      : "memory");
}

__device__ __forceinline__ void load_shared_16(uint32_t from, uint32_t (&x)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

// ---- ordering ----------------------------------------------------------------------------------

// Orders this thread's (and, through a barrier, others') ordinary shared-memory accesses with those
// of wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// ---- registers and arithmetic ------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// 2^x; 2^-inf = 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4(uint32_t row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

}  // namespace jax_dsa
