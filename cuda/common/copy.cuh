// Copies between global memory, shared memory and registers: cp.async, bulk copies, predicated
// loads and stores, reductions, ldmatrix and stmatrix.
//
// A `policy` is a value of l2_policy_evict_first() or l2_policy_evict_last().
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/address.cuh"

namespace jax_dsa {

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

// ---- cp.async -----------------------------------------------------------------------------------

// Copies 16 bytes from global to shared memory, or writes zeros if !valid; `from` is then not read.
// The L2 cache fetches the 256-byte neighborhood.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid,
                                            uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(to),
      "l"(from), "r"(valid ? 16 : 0), "l"(policy)
      : "memory");
}

// Like cp_async_16, but the L2 cache fetches no neighbors.
__device__ __forceinline__ void cp_async_16_alone(uint32_t to, const void* from, bool valid,
                                                  uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

// Like cp_async_16_alone, without an L2 policy.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Copies 8 or 4 bytes in the same way.
__device__ __forceinline__ void cp_async_8(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 8 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Arrives once at the mbarrier when all earlier cp.async of this thread have landed.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

// Waits until all cp.async of this thread have landed.
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Closes this thread's open group of cp.async. The group may be empty.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but this thread's last `kGroups` groups have landed.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// ---- bulk copies --------------------------------------------------------------------------------

// Copies `bytes` from global to shared memory; sizes and addresses are multiples of 16. The bytes
// count towards the mbarrier's phase.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes,
                                          uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
      : "memory");
}

// Copies `bytes` from shared to global memory, in this thread's open group.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
      "r"(smem_address(from)), "r"(bytes), "l"(policy)
      : "memory");
}

// Adds floats in shared memory to global memory, in this thread's open group.
__device__ __forceinline__ void bulk_add(float* to, const void* from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(smem_address(from)), "r"(bytes)
      : "memory");
}

// Closes this thread's open group of bulk stores and additions.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but this thread's last `kGroups` groups have read shared memory.
template <int kGroups = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// Waits until all groups of this thread have been written.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Prefetches `bytes` into the L2 cache. The size and the address are multiples of 16.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Prefetches one cache line into the L2 cache.
__device__ __forceinline__ void prefetch_line_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Returns whether the thread must call prefetch_block_l2: a single thread, or every thread of the
// CTA.
__device__ __forceinline__ bool prefetches_block_l2() {
#if __CUDA_ARCH__ >= 900
  return threadIdx.x == 0;
#else
  return true;
#endif
}

// Does the same as prefetch_l2, together with the other threads that must call it.
__device__ __forceinline__ void prefetch_block_l2(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  prefetch_l2(from, bytes);
#else
  constexpr uint32_t kLine = 128;
  for (uint32_t i = threadIdx.x * kLine; i < bytes; i += blockDim.x * kLine) {
    prefetch_line_l2(static_cast<const char*>(from) + i);
  }
#endif
}

// ---- predicated loads and stores ----------------------------------------------------------------

// Returns *from, or `otherwise` if !valid. The compiler cannot delay the load until its first use.
// Only for data that nobody writes meanwhile.
__device__ __forceinline__ int load_now(const int* from, bool valid, int otherwise) {
  int x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, %3;\n"
      "@p ld.global.nc.b32 %0, [%1];\n}\n"
      : "=r"(x)
      : "l"(from), "r"(int{valid}), "r"(otherwise));
  return x;
}

__device__ __forceinline__ float load_now(const float* from, bool valid, float otherwise) {
  float x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, %3;\n"
      "@p ld.global.nc.b32 %0, [%1];\n}\n"
      : "=f"(x)
      : "l"(from), "r"(int{valid}), "f"(otherwise));
  return x;
}

// Loads 8 bytes in the same way, or zeros.
__device__ __forceinline__ void load_8_now(const void* from, bool valid, uint32_t (&x)[2]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n}\n"
      : "=&r"(x[0]), "=&r"(x[1])
      : "l"(from), "r"(int{valid}));
}

// Loads 16 bytes at from + kOffset in the same way, or zeros.
template <int kOffset>
__device__ __forceinline__ void load_16_now(const void* from, bool valid, uint32_t (&x)[4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4 + %6];\n}\n"
      : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
      : "l"(from), "r"(int{valid}), "n"(kOffset));
}

// Stores 16 bytes to global memory if `valid`, with the streaming cache hint.
__device__ __forceinline__ void store_16(void* to, const uint32_t (&x)[4], bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(to),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(int{valid})
      : "memory");
}

// Stores two floats to global memory if `valid`, with the streaming cache hint: unchanged, or
// converted to bf16.
__device__ __forceinline__ void store_pair(float* to, float a, float b, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.cs.v2.f32 [%0], {%1, %2};\n}\n" ::"l"(
          to),
      "f"(a), "f"(b), "r"(int{valid})
      : "memory");
}

__device__ __forceinline__ void store_pair(__nv_bfloat16* to, float a, float b, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 x;\nsetp.ne.b32 p, %3, 0;\n"
      "cvt.rn.bf16x2.f32 x, %2, %1;\n@p st.global.cs.b32 [%0], x;\n}\n" ::"l"(to),
      "f"(a), "f"(b), "r"(int{valid})
      : "memory");
}

// Stores four floats to global memory at a 16-byte aligned address. The compiler may split an
// ordinary store of a float4.
__device__ __forceinline__ void store_4(float* to, const float (&x)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ void load_shared_16(uint32_t from, uint32_t (&x)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_16(uint32_t to, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t to, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t to, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}

// A store that may race with other such stores to the same word. The value of one of them remains,
// whole.
template <typename T>
__device__ __forceinline__ void store_any(T& to, T x) {
  to = x;
}

// ---- reductions ---------------------------------------------------------------------------------

// Adds 1 to a counter in shared memory if `is`, without a branch.
__device__ __forceinline__ void count_if(int* counter, bool is) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p red.shared.add.u32 [%0], 1;\n}\n" ::"r"(
                   smem_address(counter)),
               "r"(int{is})
               : "memory");
}

// Adds to four floats in global memory at a 16-byte aligned address.
__device__ __forceinline__ void red_add(float* to, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
#else
  asm volatile(
      "red.global.add.f32 [%0], %1;\nred.global.add.f32 [%0 + 4], %2;\n"
      "red.global.add.f32 [%0 + 8], %3;\nred.global.add.f32 [%0 + 12], %4;" ::"l"(to),
      "f"(x), "f"(y), "f"(z), "f"(w)
      : "memory");
#endif
}

// Adds to two floats in global memory at an 8-byte aligned address if `valid`.
__device__ __forceinline__ void red_add(float* to, float x, float y, bool valid) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "@p red.global.add.v2.f32 [%0], {%1, %2};\n}\n" ::"l"(to),
      "f"(x), "f"(y), "r"(int{valid})
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "@p red.global.add.f32 [%0], %1;\n@p red.global.add.f32 [%0 + 4], %2;\n}\n" ::"l"(to),
      "f"(x), "f"(y), "r"(int{valid})
      : "memory");
#endif
}

// Adds to four floats if `valid`.
__device__ __forceinline__ void red_add(float* to, float x, float y, float z, float w, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(to),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(int{valid})
      : "memory");
}

// ---- 8x8 matrices of 16-bit elements ------------------------------------------------------------

// Stores four matrices to shared memory. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
#else
  const uint32_t x[4] = {a, b, c, d};
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_shared_4(__shfl_sync(~0u, row, i * 8 + lane / 4) + lane % 4 * 4, x[i]);
  }
#endif
}

// Stores the transposed matrices: lane l gives the address of column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t column, uint32_t a, uint32_t b,
                                                           uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// Loads four matrices. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix_x4(uint32_t row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// Loads the transposed matrices. With row = lane % 4 * 2, a lane receives of each matrix the
// elements (row, lane / 4) and (row + 1, lane / 4).
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

}  // namespace jax_dsa
