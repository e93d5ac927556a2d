// PTX instructions that only the top-k kernels use. Shared memory is accessed with 32-bit addresses
// and predicated stores. The kernels are limited by instruction issue, and the compiler would
// branch around every store and recompute its base address.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa::topk {

// Loads 16 bytes that are constant while the kernel runs.
__device__ __forceinline__ float4 load_aligned(const float* from) {
  float4 x;
  asm("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "l"(from));
  return x;
}

// Loads two entries: value, index, value, index.
__device__ __forceinline__ int4 load_entries(uint32_t from) {
  int4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ float load_value(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
// Increments word distance >> shift of `bins` if distance <= range.
__device__ __forceinline__ void increment_within(uint32_t bins, unsigned distance, unsigned range,
                                                 int shift) {
  asm volatile(
      "{\n"
      ".reg .pred within;\n"
      "setp.le.u32 within, %0, %1;\n"
      "@within red.shared.add.u32 [%2], 1;\n"
      "}\n" ::"r"(distance),
      "r"(range), "r"(bins + 4 * (distance >> shift))
      : "memory");
}
// Stores an entry at `to` and advances `to`, if `keep`.
__device__ __forceinline__ void append_if(bool keep, uint32_t& to, float value, int index) {
  asm volatile(
      "{\n"
      ".reg .pred keep;\n"
      "setp.ne.s32 keep, %1, 0;\n"
      "@keep st.shared.v2.b32 [%0], {%2, %3};\n"
      "@keep add.u32 %0, %0, 8;\n"
      "}\n"
      : "+r"(to)
      : "r"(static_cast<int>(keep)), "r"(__float_as_int(value)), "r"(index)
      : "memory");
}
// Does the same if the value exceeds `cut`, which NaN never does.
__device__ __forceinline__ void append_above(float cut, uint32_t& to, float value, int index) {
  asm volatile(
      "{\n"
      ".reg .pred keep;\n"
      "setp.gt.f32 keep, %2, %1;\n"
      "@keep st.shared.v2.b32 [%0], {%3, %4};\n"
      "@keep add.u32 %0, %0, 8;\n"
      "}\n"
      : "+r"(to)
      : "f"(cut), "f"(value), "r"(__float_as_int(value)), "r"(index)
      : "memory");
}
// Adds `step` to `sum` if the value exceeds `cut`.
__device__ __forceinline__ void count_above(float cut, unsigned& sum, float value, unsigned step) {
  asm("{\n"
      ".reg .pred keep;\n"
      "setp.gt.f32 keep, %2, %1;\n"
      "@keep add.u32 %0, %0, %3;\n"
      "}\n"
      : "+r"(sum)
      : "f"(cut), "f"(value), "r"(step));
}

// Stores only the index at `to` and advances `to`, if the value exceeds `cut`.
__device__ __forceinline__ void append_index_above(float cut, uint32_t& to, float value,
                                                   int index) {
  asm volatile(
      "{\n"
      ".reg .pred keep;\n"
      "setp.gt.f32 keep, %2, %1;\n"
      "@keep st.shared.b32 [%0], %3;\n"
      "@keep add.u32 %0, %0, 4;\n"
      "}\n"
      : "+r"(to)
      : "f"(cut), "f"(value), "r"(index)
      : "memory");
}

__device__ __forceinline__ void store_value(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
// Reads back what this thread stored, in a way that the compiler cannot replace by the stored
// value.
__device__ __forceinline__ float reload_value(uint32_t from) {
  float x;
  asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ int load_int(uint32_t from) {
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
// Stores x if `lane` is 0.
__device__ __forceinline__ void store_by_first(int lane, uint32_t to, int x) {
  asm volatile(
      "{\n"
      ".reg .pred first;\n"
      "setp.eq.s32 first, %0, 0;\n"
      "@first st.shared.b32 [%1], %2;\n"
      "}\n" ::"r"(lane),
      "r"(to), "r"(x)
      : "memory");
}
__device__ __forceinline__ void increment(uint32_t at) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(at) : "memory");
}

}  // namespace jax_dsa::topk
