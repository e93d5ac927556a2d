// Launcher of the portable sparse attention forward kernel.

#include "sparse_attention/launch.h"
#include "sparse_attention/portable_fwd.cuh"

namespace jax_dsa::portable {

// The tile sizes fit in the shared memory of every GPU.
cudaError_t launch_sparse_attention_fwd(const SparseAttentionFwdParams& params,
                                        const Device& device, cudaStream_t stream) {
  using namespace sparse_attention;
  return launch_fwd(
      params, stream,
      [&]<DType kType, int kD, int kE>(const PortableFwdCall& p, const TileLists& lists) {
        using Tr =
            sparse_attention::PortableTraits<kType, kD, kE, kE <= 128 ? 2 : 1, kD <= 192 ? 64 : 32>;
        static_assert(sizeof(PortableFwdShared<Tr>) <= kMinSharedBytes);
        const masked_attention::TileScheduler scheduler(p, p.groups, p.tile_queries,
                                                        device.l2_bytes);
        const int64_t ctas = scheduler.work_tiles * Tr::kParts;
        if (ctas > INT32_MAX) return cudaErrorInvalidValue;
        const auto kernel = portable_fwd_kernel<Tr>;
        DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
        return launch_blocks(kernel, ctas, Tr::kThreads, sizeof(PortableFwdShared<Tr>), stream, p,
                             scheduler, lists);
      });
}

}  // namespace jax_dsa::portable
