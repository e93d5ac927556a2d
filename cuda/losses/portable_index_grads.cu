// Launcher of the portable products in the backward pass of the indexer's logits at all keys.

#include "common/error.h"
#include "common/launch.cuh"
#include "losses/losses.h"
#include "losses/portable_index_grads.cuh"

namespace jax_dsa::portable {
namespace {

using namespace index_grads;

template <int kC, Gradient kGradient>
cudaError_t launch_gradient(const IndexGradsParams& p, int64_t work_tiles, cudaStream_t stream) {
  using Shared = PortableShared<kC, kGradient>;
  static_assert(sizeof(Shared) <= kMinSharedBytes);
  if (work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  const auto kernel = portable_index_grads_kernel<kC, kGradient>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_blocks(kernel, work_tiles, kPortableThreads, sizeof(Shared), stream, p);
}

template <int kC>
cudaError_t launch_channels(const IndexGradsParams& p, cudaStream_t stream) {
  DSA_RETURN_IF_CUDA_ERROR((launch_gradient<kC, Gradient::kQueries>(
      p, p.batch * ceil_div(p.queries, int64_t{2}), stream)));
  return launch_gradient<kC, Gradient::kKeys>(p,
                                              ceil_div(p.queries, int64_t{kIndexGradsSegment}) *
                                                  p.batch *
                                                  ceil_div(p.keys, int64_t{kIndexGradsKeys}),
                                              stream);
}

}  // namespace

cudaError_t launch_index_products(const IndexGradsParams& p, cudaStream_t stream) {
  return p.channels == 128 ? launch_channels<128>(p, stream) : launch_channels<64>(p, stream);
}

}  // namespace jax_dsa::portable
