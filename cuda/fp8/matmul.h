// Matmul of operands that are quantised to e4m3 with one scale per block.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"
#include "common/types.h"

namespace jax_dsa {

// out[m, n] = sum over K blocks j of
//     a_scale[m, j] * b_scale[n / 128, j] * (sum over k in block j of a[m, k] * b[n, k])
// A K block has 128 elements. The sum over blocks is accumulated in float32 and rounded once.
struct Fp8MatmulParams {
  const uint8_t* a;      // [batch, m, k], e4m3; 16-byte aligned, as is b
  const float* a_scale;  // [batch, m, ceil(k / 128)]
  const uint8_t* b;      // [batch, n, k]
  const float* b_scale;  // [batch, ceil(n / 128), ceil(k / 128)]
  void* out;             // [batch, m, n], dtype
  int64_t batch, m, n;
  int64_t k;  // a multiple of 16
  DType dtype;
};

cudaError_t launch_fp8_matmul(const Fp8MatmulParams& params, cudaStream_t stream);

// The launchers of the two tiers. The product has elements, but k may be 0.
namespace hopper {
cudaError_t launch_fp8_matmul(const Fp8MatmulParams& params, const Device& device,
                              cudaStream_t stream);
}  // namespace hopper

namespace portable {
cudaError_t launch_fp8_matmul(const Fp8MatmulParams& params, const Device& device,
                              cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
