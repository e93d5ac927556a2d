// Launches the indexer's portable backward kernels.

#include "common/error.h"
#include "common/launch.cuh"
#include "indexer/bwd_scale.cuh"
#include "indexer/indexer.h"
#include "indexer/portable_bwd.cuh"

namespace jax_dsa::portable {
namespace {

using namespace indexer_bwd;

template <int kC>
cudaError_t launch_channels(const IndexerBwdParams& p, cudaStream_t stream) {
  static_assert(2 * (sizeof(PortableShared<kC>) + kReservedSharedBytes) <=
                kMinSharedBytes + kReservedSharedBytes);
  const auto kernel = portable_bwd_kernel<kC>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_blocks(kernel, p.batch * p.queries, kPortableThreads, sizeof(PortableShared<kC>),
                       stream, p);
}

}  // namespace

cudaError_t launch_indexer_bwd(const IndexerBwdParams& p, cudaStream_t stream) {
  if (!is_valid(p) || p.batch * p.queries > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t rows = p.batch * p.keys;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.dk, rows * p.channels * sizeof(float), stream));
  if (p.batch > 0 && p.queries > 0) {
    DSA_RETURN_IF_CUDA_ERROR(p.channels == 128 ? launch_channels<128>(p, stream)
                                               : launch_channels<64>(p, stream));
  }
  if (rows == 0 || p.k_scale == nullptr) return cudaSuccess;
  return launch_blocks(scale_kernel, ceil_div(rows, int64_t{8}), 256, 0, stream, p);
}

}  // namespace jax_dsa::portable
