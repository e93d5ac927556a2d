#include "indexer/block_launch.cuh"

namespace jax_dsa::indexer {

template cudaError_t launch_block_channels<IndexerDType::kBF16>(const BlockMaxParams&, bool,
                                                                cudaStream_t);

}  // namespace jax_dsa::indexer
