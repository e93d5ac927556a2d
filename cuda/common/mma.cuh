// mma.sync: products by single warps, with bf16, f16 or e4m3 operands in registers and float32
// accumulators.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

// d [16, 8] += a [16, 16] b [16, 8]. Let row = lane / 4 and column = lane % 4 * 2. A register holds
// two neighboring elements of a row. A lane holds the elements of
//   a at (row, column), (row + 8, column), (row, column + 8) and (row + 8, column + 8);
//   b^T at (row, column) and (row, column + 8);
//   d at (row, column + {0, 1}) and (row + 8, column + {0, 1}), as floats.
template <DType kType>
__device__ __forceinline__ void mma_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  if constexpr (kType == DType::kBF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The same for 8 columns of a: d [16, 8] += a [16, 8] b [8, 8].
template <DType kType>
__device__ __forceinline__ void mma_8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  static_assert(kType == DType::kBF16);
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Whether the GPU multiplies e4m3 by an instruction of its own. On sm_90 and sm_100 the assembler
// converts the operands of every such mma.sync to f16, so it is better to convert them once.
#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
inline constexpr bool kHasE4m3Mma = true;
#else
inline constexpr bool kHasE4m3Mma = false;
#endif

// d [16, 8] += a [16, 32] b [32, 8]. A register holds four neighboring elements of a row. With
// row = lane / 4 and column = lane % 4 * 4, a lane holds the elements of
//   a at (row, column), (row + 8, column), (row, column + 16) and (row + 8, column + 16);
//   b^T at (row, column) and (row, column + 16).
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace jax_dsa
