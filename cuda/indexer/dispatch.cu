// Entry point of the indexer's forward kernels for Hopper. Each dtype is a translation unit of its
// own, so that they compile in parallel.

#include "indexer/indexer.h"

namespace jax_dsa {

namespace indexer {
template <IndexerDType kDType>
cudaError_t launch_channels(const IndexerFwdParams& p, bool few, cudaStream_t stream);
extern template cudaError_t launch_channels<IndexerDType::kBF16>(const IndexerFwdParams&, bool,
                                                                 cudaStream_t);
extern template cudaError_t launch_channels<IndexerDType::kE4M3>(const IndexerFwdParams&, bool,
                                                                 cudaStream_t);
}  // namespace indexer

cudaError_t hopper::launch_indexer_fwd(const IndexerFwdParams& p, cudaStream_t stream) {
  const bool few = p.queries <= kIndexerDecodeQueries;
  return p.dtype == IndexerDType::kBF16
             ? indexer::launch_channels<IndexerDType::kBF16>(p, few, stream)
             : indexer::launch_channels<IndexerDType::kE4M3>(p, few, stream);
}

}  // namespace jax_dsa
