// Entry point of the block-maximum kernels for Hopper. Each dtype is a translation unit of its own.
#include "common/tile.cuh"
#include "indexer/block_max.h"

namespace jax_dsa {

namespace indexer {
template <IndexerDType kDType>
cudaError_t launch_block_channels(const BlockMaxParams& p, bool pairs, cudaStream_t stream);
extern template cudaError_t launch_block_channels<IndexerDType::kBF16>(const BlockMaxParams&, bool,
                                                                       cudaStream_t);
extern template cudaError_t launch_block_channels<IndexerDType::kE4M3>(const BlockMaxParams&, bool,
                                                                       cudaStream_t);
}  // namespace indexer

cudaError_t hopper::launch_block_max(const indexer::BlockMaxParams& params, cudaStream_t stream) {
  indexer::BlockMaxParams p = params;
  const bool pairs = p.unit_keys == kTile;
  if (pairs) p.unit_keys *= 2;
  return p.in.dtype == IndexerDType::kBF16
             ? indexer::launch_block_channels<IndexerDType::kBF16>(p, pairs, stream)
             : indexer::launch_block_channels<IndexerDType::kE4M3>(p, pairs, stream);
}

}  // namespace jax_dsa
