// Dequantisation: e4m3 codes times the scales of their blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

struct DequantizeParams {
  const uint8_t* q;    // [batch, rows, cols], e4m3
  const float* scale;  // [batch, ceil(rows / block_rows), ceil(cols / 128)]
  void* x;             // [batch, rows, cols], dtype
  int64_t batch, rows, cols;
  int block_rows;  // 1 or 128
  DType dtype;
};

cudaError_t launch_dequantize(const DequantizeParams& params, cudaStream_t stream);

}  // namespace jax_dsa
