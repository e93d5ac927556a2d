// Launches the Hopper kernels of the FP8 matmul.

#include "fp8/matmul_launch.cuh"
#include "fp8/matmul_plan.h"

namespace jax_dsa {

namespace fp8 {
namespace {

template <int kWarpgroups, int kRowBlocks, bool kBScalePerRow>
cudaError_t launch_many_rows(const Fp8MatmulParams& p, bool cta_pair, cudaStream_t stream) {
  return cta_pair ? launch<Traits<kWarpgroups, kRowBlocks, 2, kBScalePerRow>>(p, stream)
                  : launch<Traits<kWarpgroups, kRowBlocks, 1, kBScalePerRow>>(p, stream);
}

template <int kRows, bool kBScalePerRow>
cudaError_t launch_thin(const Fp8MatmulParams& p, const Plan& plan, cudaStream_t stream) {
  return plan.ctas_per_sm == 3
             ? launch_few_rows<ThinTraits<kRows, 3, kBScalePerRow>>(p, plan.k_splits, stream)
             : launch_few_rows<ThinTraits<kRows, 2, kBScalePerRow>>(p, plan.k_splits, stream);
}

template <bool kBScalePerRow>
cudaError_t launch_planned(const Fp8MatmulParams& p, const Plan& plan, cudaStream_t stream) {
  if (plan.few_rows) {
    switch (plan.rows) {
      case 16:
        return launch_thin<16, kBScalePerRow>(p, plan, stream);
      case 32:
        return launch_thin<32, kBScalePerRow>(p, plan, stream);
      case 64:
        return launch_few_rows<Traits<1, 1, 1, kBScalePerRow>>(p, plan.k_splits, stream);
      default:
        return launch_few_rows<Traits<1, 2, 1, kBScalePerRow>>(p, plan.k_splits, stream);
    }
  }
  if (plan.rows == 128) return launch<Traits<2, 1, 1, kBScalePerRow>>(p, stream);
  if (plan.rows == 192) return launch_many_rows<3, 1, kBScalePerRow>(p, plan.cta_pair, stream);
  if constexpr (!kBScalePerRow) return launch_many_rows<2, 2, false>(p, plan.cta_pair, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace fp8

cudaError_t hopper::launch_fp8_matmul(const Fp8MatmulParams& p, const Device& device,
                                      cudaStream_t stream) {
  if (p.k == 0) {
    const int64_t bytes = p.dtype == DType::kF32 ? 4 : 2;
    return clear(p.out, p.batch * p.m * p.n * bytes, stream);
  }
  const fp8::Plan plan = fp8::plan(p, device.num_sms);
  return p.b_scale_per_row ? fp8::launch_planned<true>(p, plan, stream)
                           : fp8::launch_planned<false>(p, plan, stream);
}

}  // namespace jax_dsa
