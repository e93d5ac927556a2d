// Launchers of the portable sparse attention backward kernels.

#include "sparse_attention/launch.h"
#include "sparse_attention/portable_dkv.cuh"
#include "sparse_attention/portable_dq.cuh"

namespace jax_dsa::portable {
namespace {

using namespace sparse_attention;

// Computes dQ from the unions and delta.
template <DType kType, int kD, int kE>
cudaError_t launch_dq(const SparseAttentionBwdParams& params, const BwdWorkspace& w,
                      const Device& device, cudaStream_t stream) {
  using Tr = PortableDqTraits<kType, kD, kE>;
  static_assert(sizeof(PortableDqShared<Tr>) <= kMinSharedBytes);
  const PortableDqCall p = {params, w.unions.tile_queries};
  const masked_attention::TileScheduler scheduler(p, p.groups, p.tile_queries, device.l2_bytes);
  const int64_t ctas = scheduler.work_tiles * Tr::kParts;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = portable_dq_kernel<Tr>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_blocks(kernel, ctas, Tr::kThreads, sizeof(PortableDqShared<Tr>), stream, p,
                       scheduler, w.unions, w.delta);
}

// Computes dK and dV from the unions and delta.
template <typename Tr>
cudaError_t launch_dkv(const SparseAttentionBwdParams& p, const BwdWorkspace& w,
                       const Device& device, cudaStream_t stream) {
  DSA_RETURN_IF_CUDA_ERROR(build_inverse_lists(p, w, Tr::kStep / (p.heads / p.groups), stream));
  const auto kernel = portable_dkv_kernel<Tr>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  const int64_t ctas = std::min(w.inverse.tiles + kParts, int64_t{Tr::kCtas} * device.num_sms);
  return launch_blocks(kernel, ctas, Tr::kThreads, sizeof(PortableDkvShared<Tr>), stream, p,
                       w.inverse, w.delta);
}

// The tile sizes by head dim and shared memory: keys, rows of a step, and CTAs per SM.
template <DType kType, int kD, int kE>
cudaError_t launch_dkv_dims(const SparseAttentionBwdParams& p, const BwdWorkspace& w,
                            const Device& device, cudaStream_t stream) {
  if constexpr (kD == 256) {
    using Tr = PortableDkvTraits<kType, kD, kE, 64, 64, 1>;
    if (sizeof(PortableDkvShared<Tr>) > static_cast<size_t>(device.shared_bytes)) {
      return launch_dkv<PortableDkvTraits<kType, kD, kE, 32, 32, 2>>(p, w, device, stream);
    }
    return launch_dkv<Tr>(p, w, device, stream);
  } else {
    using Tr = PortableDkvTraits<kType, kD, kE, 64, 64, kD == 64 ? 2 : 1>;
    static_assert(sizeof(PortableDkvShared<Tr>) <= kMinSharedBytes);
    return launch_dkv<Tr>(p, w, device, stream);
  }
}

}  // namespace

cudaError_t launch_sparse_attention_bwd(const SparseAttentionBwdParams& p, const Device& device,
                                        cudaStream_t stream) {
  return launch_bwd(p, kTile, stream, [&]<DType kType, int kD, int kE>(const BwdWorkspace& w) {
    if (p.batch * p.queries > 0) {
      DSA_RETURN_IF_CUDA_ERROR((launch_dq<kType, kD, kE>(p, w, device, stream)));
    }
    return w.inverse.tiles > 0 ? launch_dkv_dims<kType, kD, kE>(p, w, device, stream) : cudaSuccess;
  });
}

}  // namespace jax_dsa::portable
