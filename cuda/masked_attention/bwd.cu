// Launcher of the masked attention backward kernels.

#include "common/error.h"
#include "masked_attention/bwd.cuh"
#include "masked_attention/bwd_launch.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {
namespace {

using namespace masked_attention;

template <typename Tr>
cudaError_t launch_main_kernel(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                               cudaStream_t stream) {
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  BwdTileScheduler scheduler(p, Tr::kKeys, device);
  if (scheduler.work_tiles == 0) return cudaSuccess;
  Bounds bounds;
  DSA_RETURN_IF_CUDA_ERROR(plan_work_tiles<Tr::kKeys>(p, w, &scheduler, &bounds, stream));
  const struct {
    const void* x;
    int64_t length;
    int heads, dim, rows;
  } arrays[] = {
      {p.q, p.queries, p.heads, p.dim, kStepQueries},
      {p.k, p.keys, p.groups, p.dim, Tr::kKeys},
      {p.v, p.keys, p.groups, p.value_dim, Tr::kKeys},
      {p.dout, p.queries, p.heads, p.value_dim, kStepQueries},
  };
  CUtensorMap maps[4];
  for (int i = 0; i < 4; ++i) {
    const auto& a = arrays[i];
    DSA_RETURN_IF_CUDA_ERROR(
        encode_rows(&maps[i], p.dtype, a.x, p.batch, a.length, a.heads, a.dim, a.rows));
  }
  CUtensorMap bias_maps[2];
  for (int i = 0; i < 2; ++i) {
    DSA_RETURN_IF_CUDA_ERROR(
        encode_bias(&bias_maps[i], p, i == 0 ? p.bias.x : p.dbias, kStepQueries));
  }
  return launch_persistent<BwdShared<Tr>>(bwd_kernel<Tr>, scheduler.work_tiles, Tr::kThreads,
                                          stream, p, scheduler, w, bounds, maps[0], maps[1],
                                          maps[2], maps[3], bias_maps[0], bias_maps[1]);
}

// Rounds the float32 sums to bias gradients. Runs after the main kernel.
template <DType kType>
cudaError_t round_bias_gradients(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                                 cudaStream_t stream) {
  if (w.dbias == nullptr) return cudaSuccess;
  if (p.bias.queries == 1) {
    return launch_blocks(bias_keys_kernel<kType>,
                         ceil_div(num_bias_sums(p), int64_t{kBiasKeysThreads}), kBiasKeysThreads, 0,
                         stream, p, w.dbias);
  }
  const int64_t blocks = num_bias_sums(p) / (kStepQueries * 64);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(bias_tiles_kernel<kType>, blocks, 128, kStepQueries * 128, stream, p,
                       w.dbias);
}

template <typename Tr>
cudaError_t launch(const MaskedAttentionBwdParams& p, cudaStream_t stream) {
  const BwdWorkspace w(p, Tr::kD);
  const int64_t steps = ceil_div(p.queries, int64_t{kStepQueries});
  const int64_t blocks = p.batch * p.heads * steps;
  DSA_RETURN_IF_CUDA_ERROR(launch_rows<Tr::kType>(p, w, Tr::kD, lse_factor<Tr>(p), stream));
  if constexpr (Tr::kBias) {
    DSA_RETURN_IF_CUDA_ERROR(clear_bias_gradients(p, w, stream));
  }
  DSA_RETURN_IF_CUDA_ERROR(launch_main_kernel<Tr>(p, w, stream));
  if constexpr (Tr::kBias) {
    DSA_RETURN_IF_CUDA_ERROR(round_bias_gradients<Tr::kType>(p, w, stream));
  }
  if (blocks == 0) return cudaSuccess;
  return launch_blocks(dq_kernel<Tr::kType, Tr::kDqSlices, Tr::kDqSliceColumns, Tr::kDqPartThreads>,
                       blocks, 128 * Tr::kDqSlices, 4 * Tr::kDqSlices * 1024, stream, p, w.dq,
                       steps);
}

template <DType kType, bool kGeneral, bool kBias>
cudaError_t launch_dims(const MaskedAttentionBwdParams& p, cudaStream_t stream) {
  switch (template_dim(p)) {
    case 64:
      return launch<BwdTraits<kType, 64, 64, kGeneral, kBias>>(p, stream);
    case 128:
      return launch<BwdTraits<kType, 128, 128, kGeneral, kBias>>(p, stream);
    case 192:
      if constexpr (!kBias) return launch<BwdTraits<kType, 192, 128, kGeneral>>(p, stream);
    default:
      return launch<BwdTraits<kType, 256, 256, kGeneral, kBias>>(p, stream);
  }
}

}  // namespace

int64_t hopper::masked_attention_bwd_workspace_bytes(const MaskedAttentionBwdParams& p) {
  return BwdWorkspace(p, template_dim(p)).bytes;
}

cudaError_t hopper::launch_masked_attention_bwd(const MaskedAttentionBwdParams& p,
                                                cudaStream_t stream) {
  if (!dims_fit(p) || (p.deterministic && num_bias_sums(p) > 0)) return cudaErrorInvalidValue;
  return launch_kind(p, [&]<DType kType, bool kGeneral, bool kBias>() {
    return launch_dims<kType, kGeneral, kBias>(p, stream);
  });
}

}  // namespace jax_dsa
