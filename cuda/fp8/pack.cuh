// Results of the FP8 matmul, packed for stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/ptx.cuh"

namespace jax_dsa::fp8 {

// Four neighboring elements of a row.
template <typename T>
struct alignas(4 * sizeof(T)) Vector4 {
  T x[4];
};

// Rounds two floats to 16 bits each and packs them, the first in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return pack_bf16(low, high);
  } else {
    static_assert(std::is_same_v<T, __half>);
    const __half2 x = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&x);
  }
}

}  // namespace jax_dsa::fp8
