// Launcher of the portable masked attention backward kernels.

#include "masked_attention/bwd_launch.h"
#include "masked_attention/masked_attention.h"
#include "masked_attention/portable_bwd.cuh"

namespace jax_dsa::portable {
namespace {

using namespace masked_attention;

// Rounds the float32 sums to bias gradients.
template <DType kType>
cudaError_t round_bias_gradients(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                                 cudaStream_t stream) {
  const bool rows = p.bias.queries > 1;
  const int64_t biases =
      int64_t{p.bias.batch} * p.bias.heads * (rows ? p.queries * bias_row(p.keys) : p.keys);
  const int64_t blocks = ceil_div(biases, int64_t{kBiasKeysThreads});
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(rows ? bias_rows_kernel<kType> : bias_keys_kernel<kType>, blocks,
                       kBiasKeysThreads, 0, stream, p, w.dbias);
}

template <typename Tr>
cudaError_t launch_traits(const MaskedAttentionBwdParams& p, const Device& device,
                          cudaStream_t stream) {
  const BwdWorkspace w(p, Tr::kD);
  BwdTileScheduler scheduler(p, Tr::kKeys, device);
  DSA_RETURN_IF_CUDA_ERROR(launch_rows<Tr::kType>(p, w, Tr::kD, kLog2E, stream));
  if constexpr (Tr::kBias) {
    DSA_RETURN_IF_CUDA_ERROR(clear_bias_gradients(p, w, stream));
  }
  if (scheduler.work_tiles > 0) {
    Bounds bounds;
    DSA_RETURN_IF_CUDA_ERROR(plan_work_tiles<Tr::kKeys>(p, w, &scheduler, &bounds, stream));
    DSA_RETURN_IF_CUDA_ERROR(launch_blocks(portable_bwd_kernel<Tr>, scheduler.work_tiles,
                                           Tr::kThreads, sizeof(PortableBwdShared<Tr>), stream, p,
                                           scheduler, w, bounds));
  }
  if constexpr (Tr::kBias) {
    if (w.dbias) DSA_RETURN_IF_CUDA_ERROR(round_bias_gradients<Tr::kType>(p, w, stream));
  }
  const int64_t steps = scheduler.steps * (kStepQueries / Tr::kStep);
  const int64_t blocks = p.batch * p.heads * steps;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(portable_dq_kernel<Tr>, blocks, Tr::kThreads, Tr::kDBlocks * Tr::kStep * 128,
                       stream, p, w.dq, steps);
}

// The tile sizes by head dim and shared memory: keys, queries of a step, buffers of Q and of dO.
// The first that fits is taken.
template <DType kType, bool kGeneral, bool kBias>
cudaError_t launch_dims(const MaskedAttentionBwdParams& p, const Device& device,
                        cudaStream_t stream) {
  const auto launch = [&]<int kD, int kE, int kKeys, int kStep, int kQ, int kDout>() {
    using Tr = PortableBwdTraits<kType, kD, kE, kGeneral, kBias, kKeys, kStep, kQ, kDout>;
    if (sizeof(PortableBwdShared<Tr>) > device.shared_bytes) return cudaErrorNotSupported;
    return launch_traits<Tr>(p, device, stream);
  };
  const auto first_fit = [](auto... launches) {
    cudaError_t status = cudaErrorNotSupported;
    (void)((status = launches(), status != cudaErrorNotSupported) || ...);
    return status;
  };
  switch (template_dim(p)) {
    case 64:
      return launch.template operator()<64, 64, 128, 64, 2, 2>();
    case 128:
      return first_fit([&] { return launch.template operator()<128, 128, 128, 64, 2, 2>(); },
                       [&] { return launch.template operator()<128, 128, 64, 64, 2, 1>(); });
    case 192:
      if constexpr (!kBias) {
        return first_fit([&] { return launch.template operator()<192, 128, 64, 64, 2, 2>(); },
                         [&] { return launch.template operator()<192, 128, 64, 64, 1, 1>(); });
      }
    default:
      return first_fit([&] { return launch.template operator()<256, 256, 64, 64, 2, 2>(); },
                       [&] { return launch.template operator()<256, 256, 64, 64, 1, 1>(); },
                       [&] { return launch.template operator()<256, 256, 32, 32, 2, 1>(); });
  }
}

}  // namespace

int64_t masked_attention_bwd_workspace_bytes(const MaskedAttentionBwdParams& p) {
  return BwdWorkspace(p, template_dim(p)).bytes;
}

cudaError_t launch_masked_attention_bwd(const MaskedAttentionBwdParams& p, const Device& device,
                                        cudaStream_t stream) {
  if (!dims_fit(p) || (p.deterministic && num_bias_sums(p) > 0)) return cudaErrorInvalidValue;
  return launch_kind(p, [&]<DType kType, bool kGeneral, bool kBias>() {
    return launch_dims<kType, kGeneral, kBias>(p, device, stream);
  });
}

}  // namespace jax_dsa::portable
