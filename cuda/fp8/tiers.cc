// The choice between the kernels of the FP8 matmul.
#include "fp8/matmul.h"

namespace jax_dsa {

cudaError_t launch_fp8_matmul(const Fp8MatmulParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return cudaSuccess;
  // Coordinates have 32 bits. The margin keeps the end of the last tile below 2^31 as well.
  constexpr int64_t kMaxSize = INT32_MAX - 4096;
  if (p.k % 16 != 0 || p.batch > kMaxSize || p.m > kMaxSize || p.n > kMaxSize || p.k > kMaxSize) {
    return cudaErrorInvalidValue;
  }
  const int64_t tiles = ceil_div(p.m, int64_t{64}) * ceil_div(p.n, int64_t{128});
  if (tiles > kMaxSize / 8 || p.batch * tiles > kMaxSize / 8) return cudaErrorInvalidValue;
  return launch_tier(
      [&](const Device& device) { return hopper::launch_fp8_matmul(p, device, stream); },
      [&](const Device& device) { return portable::launch_fp8_matmul(p, device, stream); });
}

}  // namespace jax_dsa
