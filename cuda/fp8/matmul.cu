// Launches the Hopper kernels of the FP8 matmul.

#include "fp8/matmul_launch.cuh"
#include "fp8/matmul_plan.h"

namespace jax_dsa {

namespace fp8 {
namespace {

template <int kWarpgroups, int kRowBlocks>
cudaError_t launch_many_rows(const Fp8MatmulParams& p, bool cta_pair, cudaStream_t stream) {
  return cta_pair ? launch<Traits<kWarpgroups, kRowBlocks, 2>>(p, stream)
                  : launch<Traits<kWarpgroups, kRowBlocks, 1>>(p, stream);
}

template <int kRows>
cudaError_t launch_thin(const Fp8MatmulParams& p, const Plan& plan, cudaStream_t stream) {
  return plan.ctas_per_sm == 3 ? launch_few_rows<ThinTraits<kRows, 3>>(p, plan.k_splits, stream)
                               : launch_few_rows<ThinTraits<kRows, 2>>(p, plan.k_splits, stream);
}

cudaError_t launch_planned(const Fp8MatmulParams& p, const Plan& plan, cudaStream_t stream) {
  if (plan.few_rows) {
    switch (plan.rows) {
      case 16:
        return launch_thin<16>(p, plan, stream);
      case 32:
        return launch_thin<32>(p, plan, stream);
      case 64:
        return launch_few_rows<Traits<1, 1, 1>>(p, plan.k_splits, stream);
      default:
        return launch_few_rows<Traits<1, 2, 1>>(p, plan.k_splits, stream);
    }
  }
  if (plan.rows == 128) return launch<Traits<2, 1, 1>>(p, stream);
  if (plan.rows == 192) return launch_many_rows<3, 1>(p, plan.cta_pair, stream);
  return launch_many_rows<2, 2>(p, plan.cta_pair, stream);
}

}  // namespace
}  // namespace fp8

cudaError_t hopper::launch_fp8_matmul(const Fp8MatmulParams& p, const Device& device,
                                      cudaStream_t stream) {
  if (p.k == 0) {
    const int64_t bytes = p.dtype == DType::kF32 ? 4 : 2;
    return clear(p.out, p.batch * p.m * p.n * bytes, stream);
  }
  return fp8::launch_planned(p, fp8::plan(p, device.num_sms), stream);
}

}  // namespace jax_dsa
