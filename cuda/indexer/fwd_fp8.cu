#include "indexer/launch.cuh"

namespace jax_dsa::indexer {

template cudaError_t launch_channels<IndexerDType::kE4M3>(const IndexerFwdParams&, bool,
                                                          cudaStream_t);

}  // namespace jax_dsa::indexer
