// Entry point of the FP8 matmul.

#include "fp8/matmul_launch.cuh"
#include "fp8/matmul_plan.h"

namespace jax_dsa {

namespace fp8 {
namespace {

template <bool kBRows>
cudaError_t launch_planned(const Fp8MatmulParams& p, const Plan& plan, cudaStream_t stream) {
  if (plan.few) {
    return plan.rows == 64 ? launch_few<Traits<1, 1, 128, 1, kBRows>>(p, plan.parts, stream)
                           : launch_few<Traits<1, 2, 128, 1, kBRows>>(p, plan.parts, stream);
  }
  if (plan.rows == 128 && plan.columns == 128) {
    return launch<Traits<2, 1, 128, 1, kBRows>>(p, stream);
  }
  constexpr int kHalves = kBRows ? 1 : 2, kColumns = kBRows ? 192 : 128;
  return plan.pair ? launch<Traits<2, kHalves, kColumns, 2, kBRows>>(p, stream)
                   : launch<Traits<2, kHalves, kColumns, 1, kBRows>>(p, stream);
}

}  // namespace
}  // namespace fp8

cudaError_t launch_fp8_matmul(const Fp8MatmulParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return cudaSuccess;
  if (p.k == 0) {
    const int64_t bytes = p.dtype == DType::kF32 ? 4 : 2;
    return clear(p.out, p.batch * p.m * p.n * bytes, stream);
  }
  // TMA counts in 32 bits, and the last tile ends below 2^31, too.
  constexpr int64_t kMost = INT32_MAX - 4096;
  if (p.k % 16 != 0 || p.batch > kMost || p.m > kMost || p.n > kMost || p.k > kMost) {
    return cudaErrorInvalidValue;
  }
  const int64_t tiles = ceil_div(p.m, int64_t{64}) * ceil_div(p.n, int64_t{fp8::kBColumns});
  if (tiles > kMost / 8 || p.batch * tiles > kMost / 8) return cudaErrorInvalidValue;
  Device device;
  if (cudaError_t e = current_device(&device); e != cudaSuccess) return e;
  const fp8::Plan plan = fp8::plan(p, device.processors);
  return p.b_rows ? fp8::launch_planned<true>(p, plan, stream)
                  : fp8::launch_planned<false>(p, plan, stream);
}

}  // namespace jax_dsa
