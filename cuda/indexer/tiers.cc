// The choice between the kernels of the indexer.
#include "indexer/indexer.h"

namespace jax_dsa {

cudaError_t launch_indexer_bwd(const IndexerBwdParams& p, cudaStream_t stream) {
  return launch_tier([&](const Device&) { return hopper::launch_indexer_bwd(p, stream); },
                     [&](const Device&) { return portable::launch_indexer_bwd(p, stream); });
}

}  // namespace jax_dsa
