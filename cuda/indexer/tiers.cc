// The choice between the kernels of the indexer.
#include "indexer/block_max.h"
#include "indexer/candidates.h"
#include "indexer/indexer.h"

namespace jax_dsa {

cudaError_t launch_indexer_fwd(const IndexerFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.keys == 0) return cudaSuccess;
  if (!is_valid(p)) return cudaErrorInvalidValue;
  return launch_tier(
      [&](const Device&) { return hopper::launch_indexer_fwd(p, stream); },
      [&](const Device& device) { return portable::launch_indexer_fwd(p, device, stream); });
}

cudaError_t launch_block_max(const indexer::BlockMaxParams& p, cudaStream_t stream) {
  return launch_tier(
      [&](const Device&) { return hopper::launch_block_max(p, stream); },
      [&](const Device& device) { return portable::launch_block_max(p, device, stream); });
}

cudaError_t launch_candidate_logits(const IndexerFwdParams& p, const indexer::CandidateRows& x,
                                    cudaStream_t stream) {
  return launch_tier([&](const Device&) { return hopper::launch_candidate_logits(p, x, stream); },
                     [&](const Device& device) {
                       return portable::launch_candidate_logits(p, x, device, stream);
                     });
}

cudaError_t launch_indexer_bwd(const IndexerBwdParams& p, cudaStream_t stream) {
  return launch_tier([&](const Device&) { return hopper::launch_indexer_bwd(p, stream); },
                     [&](const Device&) { return portable::launch_indexer_bwd(p, stream); });
}

}  // namespace jax_dsa
