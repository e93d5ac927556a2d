// Types and arithmetic that kernels and launchers share. Nothing in cuda/ depends on JAX or XLA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

// Element types, for kernels that accept more than one.
enum class DType { kBF16, kF16, kF32 };

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

template <typename Int>
__host__ __device__ constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

}  // namespace jax_dsa
