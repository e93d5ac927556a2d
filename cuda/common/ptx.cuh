// Thin wrappers of the sm_90 instructions that the kernels share: mbarriers, cp.async, named
// barriers, register budgets. wgmma has a header of its own.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// to + offset, for cp_async_16. ptxas 13.0 may leave an address as register + uniform register, and
// encodes a cp.async of such an address as an illegal instruction; the larger of the sum and the
// offset, which is the sum, cannot be split. tests/test_machine_code.py looks for such addresses.
__device__ __forceinline__ uint32_t whole_sum(uint32_t to, uint32_t offset) {
  return max(to + offset, offset);
}

// `x`, which is the same in all lanes, in a uniform register; where it comes from is hidden from
// the assembler, which would otherwise compute it anew at each use.
template <typename T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(~0u, x, 0);
}

// `x`, which the compiler takes for a value that it must not compute anew; what follows from it is
// computed after this.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  uint32_t y;
  asm volatile("mov.u32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// 1, in grids of one dimension, as the assembler does not know.
__device__ __forceinline__ uint32_t opaque_one() {
  uint32_t one;
  asm("mov.u32 %0, %%nctaid.y;" : "=r"(one));
  return one;
}

// Sums over the lanes of a warp up to each.
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

// The block's dynamic shared memory.
template <typename T>
__device__ __forceinline__ T& dynamic_shared() {
  extern __shared__ uint8_t raw[];
  return *reinterpret_cast<T*>(raw);
}

// threadIdx.x, read here: what follows from it is not kept in registers from before.
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
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

// At the same barrier of the cluster's block `rank`. For what this thread's warp has read, and has
// in registers: `release.cluster` would order its writes, too, by a fence of all memory that costs
// about a microsecond.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// So many arrivals.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(arrivals)
               : "memory");
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

// 16 bytes likewise, of which the L2 fetches no neighbours.
__device__ __forceinline__ void cp_async_16_alone(uint32_t to, const void* from, bool valid,
                                                  uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}
// 4 bytes likewise.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// One of the barrier's arrivals, made when all cp.async of this thread so far have landed.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

// Waits until all cp.async of this thread have landed.
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

// Asks for the line of an address to be in the L2 soon.
__device__ __forceinline__ void prefetch_line_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Adds one to a counter in shared memory, without a branch.
__device__ __forceinline__ void count_if(int* counter, bool is) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p red.shared.add.u32 [%0], 1;\n}\n" ::"r"(
                   smem_address(counter)),
               "r"(int{is})
               : "memory");
}

// Asks for `bytes` (a multiple of 16) from an address that is one, too, to be in the L2 soon.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// A store that may race with others of its kind: one of them stays, whole.
template <typename T>
__device__ __forceinline__ void store_any(T& to, T x) {
  to = x;
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

// 16 bytes at from + kOffset likewise, or zeros.
template <int kOffset>
__device__ __forceinline__ void load_16_now(const void* from, bool valid, uint32_t (&x)[4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4 + %6];\n}\n"
      : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
      : "l"(from), "r"(int{valid}), "n"(kOffset));
}

// Eight bytes likewise.
__device__ __forceinline__ void load_8_now(const void* from, bool valid, uint32_t (&x)[2]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n}\n"
      : "=&r"(x[0]), "=&r"(x[1])
      : "l"(from), "r"(int{valid}));
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

// ---- bulk copies -------------------------------------------------------------------------------

// `bytes` (a multiple of 16, like the addresses) to shared memory; counts as so many bytes of the
// barrier's phase. `policy` is of `l2_policy_*`.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes,
                                          uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
      : "memory");
}
// This thread's arrival, and the bytes that copies will complete in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}
// From shared to global memory, in this thread's open group.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
      "r"(smem_address(from)), "r"(bytes), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's stores, but for its last `kGroups` groups, have read shared memory; or
// until all are written.
template <int kGroups = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- between blocks ----------------------------------------------------------------------------

// Adds one, after everything this thread has written or seen written, bulk stores included.
__device__ __forceinline__ void counter_add(uint32_t* counter) {
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// Waits until the counter is `count` or more, before anything this thread reads afterwards, by bulk
// loads too.
__device__ __forceinline__ void counter_wait(const uint32_t* counter, uint32_t count) {
  uint32_t x;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  } while (x < count);
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Adds to four floats in global memory, 16-byte aligned.
__device__ __forceinline__ void red_add(float* to, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}
// The same if `valid`.
__device__ __forceinline__ void red_add(float* to, float x, float y, float z, float w, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(to),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(int{valid})
      : "memory");
}

// ---- between kernels ---------------------------------------------------------------------------

// See `launch_pdl` in common/launch.cuh.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- ordinary copies ---------------------------------------------------------------------------

// 16 bytes to global memory if `valid`, not to be kept in caches.
__device__ __forceinline__ void store_16(void* to, const uint32_t (&x)[4], bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(to),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(int{valid})
      : "memory");
}

// Two floats to global memory if `valid`, likewise: as they are, or as bf16.
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

// Four floats to global memory, 16-byte aligned; the compiler may split a store of a float4.
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

__device__ __forceinline__ void store_shared_16(uint32_t to, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
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
// The same, and tells whether any thread's `x` is true.
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

// log2(x), of denormals too.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of an angle in turns, at most half a one, to within 2^-20.
__device__ __forceinline__ float2 cosine_and_sine(float turn) {
  const float angle = turn * 6.2831853f;
  float2 y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y.x) : "f"(angle));
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y.y) : "f"(angle));
  return y;
}

// To within an ulp.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A maximum that keeps NaN, as relu has to.
__device__ __forceinline__ float max_nan(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

// Two floats as bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The same as f16.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <DType kType>
__device__ __forceinline__ uint32_t pack_16(float low, float high) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  return kType == DType::kBF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}

__device__ __forceinline__ float2 unpack_f16(uint32_t packed) {
  float2 x;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
      : "=f"(x.x), "=f"(x.y)
      : "r"(packed));
  return x;
}
template <DType kType>
__device__ __forceinline__ float2 unpack_16(uint32_t packed) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  return kType == DType::kBF16 ? unpack_bf16(packed) : unpack_f16(packed);
}

// Four e4m3 values, exactly.
__device__ __forceinline__ void unpack_e4m3(uint32_t packed, float (&x)[4]) {
  asm("{\n.reg .b16 low, high, a, b, c, d;\n.reg .b32 ab, cd;\n"
      "mov.b32 {low, high}, %4;\n"
      "cvt.rn.f16x2.e4m3x2 ab, low;\ncvt.rn.f16x2.e4m3x2 cd, high;\n"
      "mov.b32 {a, b}, ab;\nmov.b32 {c, d}, cd;\n"
      "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}\n"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "r"(packed));
}

// 16 bits each of the top bits of bytes 2 * kHalf (in the lower half) and 2 * kHalf + 1 of x.
template <int kHalf>
__device__ __forceinline__ uint32_t spread_top_bits(uint32_t x) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(kHalf == 0 ? 0x9988 : 0xbbaa));
  return y;
}

// Bytes 2 * kHalf (in the lower half) and 2 * kHalf + 1 of x, each with its sign in 16 bits.
template <int kHalf>
__device__ __forceinline__ uint32_t sign_extended_bytes(uint32_t x) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(kHalf == 0 ? 0x9180 : 0xb3a2));
  return y;
}

// Two products of bf16, subnormals included.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Of two bf16: 0xffff in place of each that is > 0, else 0.
__device__ __forceinline__ uint32_t positive_bf16(uint32_t packed) {
  uint32_t mask;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(packed), "r"(0));
  return mask;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// Transposed: that address is where column l % 8 goes.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t column, uint32_t a, uint32_t b,
                                                           uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
__device__ __forceinline__ void load_matrix_x4(uint32_t row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// Transposed: a lane gets of each matrix column lane / 4, of rows lane % 4 * 2 and the next.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

}  // namespace jax_dsa
