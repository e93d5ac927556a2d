// Matmul of operands that are quantised to e4m3 by blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

// out[m, n] = sum over blocks j of 128 of K of
//     a_scale[m, j] * b_scale[n / 128, j] * sum over k in j of a[m, k] * b[n, k]
// accumulated in f32 and rounded once.
struct Fp8MatmulParams {
  const uint8_t* a;      // [batch, m, k], e4m3, at a multiple of 16 bytes, like b
  const float* a_scale;  // [batch, m, ceil(k / 128)]
  const uint8_t* b;      // [batch, n, k]
  const float* b_scale;  // [batch, ceil(n / 128), ceil(k / 128)]; [batch, n, ..] if `b_rows`
  void* out;             // [batch, m, n], of `dtype`
  int64_t batch, m, n;
  int64_t k;  // a multiple of 16
  DType dtype;
  bool b_rows;  // blocks of b are 1x128, with b_scale[n, j] for b_scale[n / 128, j]
};

cudaError_t launch_fp8_matmul(const Fp8MatmulParams& params, cudaStream_t stream);

}  // namespace jax_dsa
