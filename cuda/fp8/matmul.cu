// Entry point of the FP8 matmul.

#include "common/error.h"
#include "fp8/matmul_launch.cuh"
#include "fp8/matmul_plan.h"

namespace jax_dsa {

namespace fp8 {
namespace {

template <int kGroups, int kHalves, bool kBRows>
cudaError_t launch_many(const Fp8MatmulParams& p, bool pair, cudaStream_t stream) {
  return pair ? launch<Traits<kGroups, kHalves, 2, kBRows>>(p, stream)
              : launch<Traits<kGroups, kHalves, 1, kBRows>>(p, stream);
}

template <int kRows, bool kBRows>
cudaError_t launch_thin(const Fp8MatmulParams& p, const Plan& plan, cudaStream_t stream) {
  return plan.blocks == 3 ? launch_few<ThinTraits<kRows, 3, kBRows>>(p, plan.parts, stream)
                          : launch_few<ThinTraits<kRows, 2, kBRows>>(p, plan.parts, stream);
}

template <bool kBRows>
cudaError_t launch_planned(const Fp8MatmulParams& p, const Plan& plan, cudaStream_t stream) {
  if (plan.few) {
    switch (plan.rows) {
      case 16:
        return launch_thin<16, kBRows>(p, plan, stream);
      case 32:
        return launch_thin<32, kBRows>(p, plan, stream);
      case 64:
        return launch_few<Traits<1, 1, 1, kBRows>>(p, plan.parts, stream);
      default:
        return launch_few<Traits<1, 2, 1, kBRows>>(p, plan.parts, stream);
    }
  }
  if (plan.rows == 128) return launch<Traits<2, 1, 1, kBRows>>(p, stream);
  if (plan.rows == 192) return launch_many<3, 1, kBRows>(p, plan.pair, stream);
  if constexpr (!kBRows) return launch_many<2, 2, false>(p, plan.pair, stream);
  return cudaErrorInvalidValue;
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
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const fp8::Plan plan = fp8::plan(p, device.num_sms);
  return p.b_rows ? fp8::launch_planned<true>(p, plan, stream)
                  : fp8::launch_planned<false>(p, plan, stream);
}

}  // namespace jax_dsa
