// Division by numbers that the host knows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

// A positive divisor. Kernels divide by it with one multiplication and a shift, where a division
// takes about 30 instructions. Dividends must not be negative.
//
// With 2^(l-1) < d <= 2^l, the factor ceil(2^(31+l) / d) fits into 32 bits, and its error is less
// than d / 2^(31+l) of 1/d, which changes no quotient of a dividend below 2^31.
struct Divisor {
  int value = 1;
  uint32_t factor = uint32_t{1} << 31;
  int shift = 0;

  Divisor() = default;
  Divisor(int d) : value(d) {
    while (int64_t{1} << shift < d) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + d - 1) / d);
  }
  __host__ __device__ operator int() const { return value; }

  friend __host__ __device__ __forceinline__ int operator/(int a, const Divisor& d) {
    return static_cast<int>((uint64_t{static_cast<uint32_t>(a) << 1} * d.factor >> 32) >> d.shift);
  }
  friend __host__ __device__ __forceinline__ int operator%(int a, const Divisor& d) {
    return a - a / d * d.value;
  }
};

}  // namespace jax_dsa
