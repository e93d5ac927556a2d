// Quantisation to e4m3 with one float32 scale for each 1x128 block of a row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

inline constexpr int kQuantizeBlock = 128;

struct QuantizeParams {
  const void* x;  // [rows, cols], dtype
  uint8_t* q;     // [rows, cols], e4m3
  float* scale;   // [rows, ceil(cols / 128)]
  int64_t rows;
  int64_t cols;
  DType dtype;
  bool power_of_two_scale;  // round every scale up to a power of two
};

cudaError_t launch_quantize(const QuantizeParams& params, cudaStream_t stream);

}  // namespace jax_dsa
