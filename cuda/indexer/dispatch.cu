// Entry point of the indexer's forward kernels. Each dtype is a translation unit of its own, so
// that they compile in parallel.

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

cudaError_t launch_indexer_fwd(const IndexerFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.keys == 0) return cudaSuccess;
  // The end of the last key tile must be below 2^31, too.
  if (p.keys > INT32_MAX - 4096 || p.heads < 1 || p.heads > kIndexerMaxHeads) {
    return cudaErrorInvalidValue;
  }
  if (p.page_table != nullptr &&
      (p.page_size <= 0 || p.page_size % kIndexerPageMultiple != 0 || p.pages <= 0 ||
       int64_t{p.pages} * p.page_size > INT32_MAX - 4096 ||
       p.keys != p.pages_per_request * p.page_size)) {
    return cudaErrorInvalidValue;
  }
  const bool few = p.queries <= kIndexerDecodeQueries;
  return p.dtype == IndexerDType::kBF16
             ? indexer::launch_channels<IndexerDType::kBF16>(p, few, stream)
             : indexer::launch_channels<IndexerDType::kE4M3>(p, few, stream);
}

}  // namespace jax_dsa
