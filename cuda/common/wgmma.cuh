// wgmma with bf16, f16 or e4m3 operands and float32 accumulators. Operands are in registers or in
// shared memory with the layouts of common/tile.cuh.
#pragma once

#include <cstdint>

#include "common/tile.cuh"
#include "common/types.h"

namespace jax_dsa {

// Must precede the first wgmma, and every wgmma whose registers other instructions have accessed.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a wait.
template <int kN>
__device__ __forceinline__ void wgmma_pin(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same for packed operands.
template <int kN, int kM>
__device__ __forceinline__ void wgmma_pin(uint32_t (&x)[kN][kM]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
#pragma unroll
    for (int j = 0; j < kM; ++j) asm volatile("" : "+r"(x[i][j])::"memory");
  }
}

// Declares the values of accumulators undefined. Use it before a product that is still in flight at
// the end of a loop iteration. Otherwise the compiler would copy the values of the last iteration
// into the accumulators, and ptxas would serialize all products.
template <int kN>
__device__ __forceinline__ void wgmma_forget(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "=f"(d[i]));
}

// clang-format off
#define JAX_DSA_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAX_DSA_REGISTERS_16 JAX_DSA_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_DSA_REGISTERS_24 JAX_DSA_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JAX_DSA_REGISTERS_32 JAX_DSA_REGISTERS_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_DSA_REGISTERS_64 JAX_DSA_REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_DSA_REGISTERS_48 JAX_DSA_REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_DSA_REGISTERS_96 JAX_DSA_REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_DSA_REGISTERS_128 JAX_DSA_REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_DSA_ACC8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAX_DSA_ACC32(d, i) \
  JAX_DSA_ACC8(d, i), JAX_DSA_ACC8(d, i + 8), JAX_DSA_ACC8(d, i + 16), JAX_DSA_ACC8(d, i + 24)
#define JAX_DSA_ACC64(d) JAX_DSA_ACC32(d, 0), JAX_DSA_ACC32(d, 32)
#define JAX_DSA_ACC128(d) JAX_DSA_ACC64(d), JAX_DSA_ACC32(d, 64), JAX_DSA_ACC32(d, 96)

// The asm operand numbers: `operands` are those of a and b, `predicate` is that of the accumulate
// flag, and `majors` are those of the operands' majors.
#define JAX_DSA_WGMMA(shape_and_types, registers, operands, predicate, majors) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " predicate ", 0;\n" \
  "wgmma.mma_async.sync.aligned." shape_and_types " {" registers "}, " operands ", p, 1, 1" \
  majors ";\n}\n"

// Which elements of an operand are contiguous: along the summed dimension K, or along the rows of a
// and the columns of b.
enum Major { kKMajor = 0, kMNMajor = 1 };

// The same instruction for bf16 and f16; `shape` is "m64n...k16".
#define JAX_DSA_WGMMA_16(shape, registers, operands, predicate, majors, ...) \
  if constexpr (kType == DType::kBF16) { \
    asm volatile(JAX_DSA_WGMMA(shape ".f32.bf16.bf16", registers, operands, predicate, majors) \
        : __VA_ARGS__); \
  } else { \
    static_assert(kType == DType::kF16); \
    asm volatile(JAX_DSA_WGMMA(shape ".f32.f16.f16", registers, operands, predicate, majors) \
        : __VA_ARGS__); \
  }

// d [64, n] (+)= a [64, 16] b [16, n], both in shared memory. A thread holds n / 2 elements of d.
template <DType kType, Major kA, Major kB, int kD>
__device__ __forceinline__ void wgmma_16(float (&d)[kD], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (kD == 8) {
    JAX_DSA_WGMMA_16("m64n16k16", JAX_DSA_REGISTERS_8, "%8, %9", "%10", ", %11, %12",
        JAX_DSA_ACC8(d, 0)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kA}), "n"(int{kB}))
  } else if constexpr (kD == 16) {
    JAX_DSA_WGMMA_16("m64n32k16", JAX_DSA_REGISTERS_16, "%16, %17", "%18", ", %19, %20",
        JAX_DSA_ACC8(d, 0), JAX_DSA_ACC8(d, 8)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kA}), "n"(int{kB}))
  } else if constexpr (kD == 24) {
    JAX_DSA_WGMMA_16("m64n48k16", JAX_DSA_REGISTERS_24, "%24, %25", "%26", ", %27, %28",
        JAX_DSA_ACC8(d, 0), JAX_DSA_ACC8(d, 8), JAX_DSA_ACC8(d, 16)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kA}), "n"(int{kB}))
  } else if constexpr (kD == 32) {
    JAX_DSA_WGMMA_16("m64n64k16", JAX_DSA_REGISTERS_32, "%32, %33", "%34", ", %35, %36",
        JAX_DSA_ACC32(d, 0)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kA}), "n"(int{kB}))
  } else if constexpr (kD == 48) {
    JAX_DSA_WGMMA_16("m64n96k16", JAX_DSA_REGISTERS_48, "%48, %49", "%50", ", %51, %52",
        JAX_DSA_ACC32(d, 0), JAX_DSA_ACC8(d, 32), JAX_DSA_ACC8(d, 40)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kA}), "n"(int{kB}))
  } else if constexpr (kD == 64) {
    JAX_DSA_WGMMA_16("m64n128k16", JAX_DSA_REGISTERS_64, "%64, %65", "%66", ", %67, %68",
        JAX_DSA_ACC64(d)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kA}), "n"(int{kB}))
  } else if constexpr (kD == 96) {
    JAX_DSA_WGMMA_16("m64n192k16", JAX_DSA_REGISTERS_96, "%96, %97", "%98", ", %99, %100",
        JAX_DSA_ACC64(d), JAX_DSA_ACC32(d, 64)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kA}), "n"(int{kB}))
  } else {
    static_assert(kD == 128);
    JAX_DSA_WGMMA_16("m64n256k16", JAX_DSA_REGISTERS_128, "%128, %129", "%130", ", %131, %132",
        JAX_DSA_ACC128(d)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kA}), "n"(int{kB}))
  }
}

// The same with a in registers, as in mma_16.
template <DType kType, Major kB, int kD>
__device__ __forceinline__ void wgmma_16(float (&d)[kD], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
  if constexpr (kD == 32) {
    JAX_DSA_WGMMA_16("m64n64k16", JAX_DSA_REGISTERS_32,
        "{%32, %33, %34, %35}, %36", "%37", ", %38",
        JAX_DSA_ACC32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(int{kB}))
  } else if constexpr (kD == 48) {
    JAX_DSA_WGMMA_16("m64n96k16", JAX_DSA_REGISTERS_48,
        "{%48, %49, %50, %51}, %52", "%53", ", %54",
        JAX_DSA_ACC32(d, 0), JAX_DSA_ACC8(d, 32), JAX_DSA_ACC8(d, 40)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(int{kB}))
  } else if constexpr (kD == 64) {
    JAX_DSA_WGMMA_16("m64n128k16", JAX_DSA_REGISTERS_64,
        "{%64, %65, %66, %67}, %68", "%69", ", %70",
        JAX_DSA_ACC64(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(int{kB}))
  } else if constexpr (kD == 96) {
    JAX_DSA_WGMMA_16("m64n192k16", JAX_DSA_REGISTERS_96,
        "{%96, %97, %98, %99}, %100", "%101", ", %102",
        JAX_DSA_ACC64(d), JAX_DSA_ACC32(d, 64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(int{kB}))
  } else {
    static_assert(kD == 128);
    JAX_DSA_WGMMA_16("m64n256k16", JAX_DSA_REGISTERS_128,
        "{%128, %129, %130, %131}, %132", "%133", ", %134",
        JAX_DSA_ACC128(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(int{kB}))
  }
}

template <Major kA, Major kB, int kD>
__device__ __forceinline__ void wgmma_bf16(float (&d)[kD], uint64_t a, uint64_t b,
                                           bool accumulate) {
  wgmma_16<DType::kBF16, kA, kB>(d, a, b, accumulate);
}
template <Major kB, int kD>
__device__ __forceinline__ void wgmma_bf16(float (&d)[kD], const uint32_t (&a)[4], uint64_t b,
                                           bool accumulate) {
  wgmma_16<DType::kBF16, kB>(d, a, b, accumulate);
}

// d [64, n] (+)= a [64, 32] b [32, n], e4m3, both K-major in shared memory.
template <int kD>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[kD], uint64_t a, uint64_t b,
                                           bool accumulate) {
  if constexpr (kD == 8) {
    asm volatile(JAX_DSA_WGMMA("m64n16k32.f32.e4m3.e4m3", JAX_DSA_REGISTERS_8,
                               "%8, %9", "%10", "")
        : JAX_DSA_ACC8(d, 0)
        : "l"(a), "l"(b), "r"(int{accumulate}));
  } else if constexpr (kD == 16) {
    asm volatile(JAX_DSA_WGMMA("m64n32k32.f32.e4m3.e4m3", JAX_DSA_REGISTERS_16,
                               "%16, %17", "%18", "")
        : JAX_DSA_ACC8(d, 0), JAX_DSA_ACC8(d, 8)
        : "l"(a), "l"(b), "r"(int{accumulate}));
  } else if constexpr (kD == 32) {
    asm volatile(JAX_DSA_WGMMA("m64n64k32.f32.e4m3.e4m3", JAX_DSA_REGISTERS_32,
                               "%32, %33", "%34", "")
        : JAX_DSA_ACC32(d, 0)
        : "l"(a), "l"(b), "r"(int{accumulate}));
  } else if constexpr (kD == 64) {
    asm volatile(JAX_DSA_WGMMA("m64n128k32.f32.e4m3.e4m3", JAX_DSA_REGISTERS_64,
                               "%64, %65", "%66", "")
        : JAX_DSA_ACC64(d)
        : "l"(a), "l"(b), "r"(int{accumulate}));
  } else {
    static_assert(kD == 128);
    asm volatile(JAX_DSA_WGMMA("m64n256k32.f32.e4m3.e4m3", JAX_DSA_REGISTERS_128,
                               "%128, %129", "%130", "")
        : JAX_DSA_ACC128(d)
        : "l"(a), "l"(b), "r"(int{accumulate}));
  }
}

#undef JAX_DSA_WGMMA_16
#undef JAX_DSA_WGMMA
#undef JAX_DSA_ACC128
#undef JAX_DSA_ACC64
#undef JAX_DSA_ACC32
#undef JAX_DSA_ACC8
#undef JAX_DSA_REGISTERS_128
#undef JAX_DSA_REGISTERS_96
#undef JAX_DSA_REGISTERS_64
#undef JAX_DSA_REGISTERS_48
#undef JAX_DSA_REGISTERS_32
#undef JAX_DSA_REGISTERS_16
#undef JAX_DSA_REGISTERS_8
// clang-format on

}  // namespace jax_dsa
