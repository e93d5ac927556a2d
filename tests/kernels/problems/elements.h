// Access to arrays of bytes whose elements have a dtype known at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <vector>

#include "common/types.h"

inline int bytes_of(jax_dsa::DType dtype) { return dtype == jax_dsa::DType::kF32 ? 4 : 2; }

inline float element(const std::vector<uint8_t>& bytes, jax_dsa::DType dtype, size_t i) {
  const void* p = bytes.data() + i * bytes_of(dtype);
  return dtype == jax_dsa::DType::kF32   ? *static_cast<const float*>(p)
         : dtype == jax_dsa::DType::kF16 ? __half2float(*static_cast<const __half*>(p))
                                         : __bfloat162float(*static_cast<const __nv_bfloat16*>(p));
}

// Appends x, rounded to `dtype`, and returns the rounded value.
inline float append(std::vector<uint8_t>& bytes, jax_dsa::DType dtype, float x) {
  const __half half = __float2half(x);
  const __nv_bfloat16 bf16 = __float2bfloat16(x);
  const void* from = dtype == jax_dsa::DType::kF32   ? static_cast<const void*>(&x)
                     : dtype == jax_dsa::DType::kF16 ? static_cast<const void*>(&half)
                                                     : &bf16;
  const auto* first = static_cast<const uint8_t*>(from);
  bytes.insert(bytes.end(), first, first + bytes_of(dtype));
  return element(bytes, dtype, bytes.size() / bytes_of(dtype) - 1);
}
