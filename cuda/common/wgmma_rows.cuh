// wgmma of two K-major operands in shared memory, bf16 or e4m3, with f32 accumulators of 128 or 256
// columns; descriptors of tiles whose rows are 32, 64 or 128 bytes, swizzled over the same width.
// An instruction contracts 32 bytes of every row.
#pragma once

#include <cstdint>

namespace jax_dsa {

// Eight rows (256, 512 or 1024 bytes, so aligned) are the swizzle's period. Adding bytes / 16 moves
// the start.
template <int kRowBytes>
__device__ __forceinline__ uint64_t k_major_rows_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return kSwizzle << 62 | uint64_t{kRowBytes * 8 >> 4} << 32 | uint64_t{1} << 16 |
         (address & 0x3ffff) >> 4;
}

// clang-format off
#define JAX_DSA_ACC8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAX_DSA_ACC32(d, i) \
  JAX_DSA_ACC8(d, i), JAX_DSA_ACC8(d, i + 8), JAX_DSA_ACC8(d, i + 16), JAX_DSA_ACC8(d, i + 24)

// d [64, 2 * its length] (+)= a b^T
__device__ __forceinline__ void wgmma_bf16(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;\n}\n"
      : JAX_DSA_ACC32(d, 0), JAX_DSA_ACC32(d, 32)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}

__device__ __forceinline__ void wgmma_bf16(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, 0, 0;\n}\n"
      : JAX_DSA_ACC32(d, 0), JAX_DSA_ACC32(d, 32), JAX_DSA_ACC32(d, 64), JAX_DSA_ACC32(d, 96)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}

__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1;\n}\n"
      : JAX_DSA_ACC32(d, 0), JAX_DSA_ACC32(d, 32)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}

__device__ __forceinline__ void wgmma_e4m3(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1;\n}\n"
      : JAX_DSA_ACC32(d, 0), JAX_DSA_ACC32(d, 32), JAX_DSA_ACC32(d, 64), JAX_DSA_ACC32(d, 96)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}

#undef JAX_DSA_ACC32
#undef JAX_DSA_ACC8
// clang-format on

}  // namespace jax_dsa
