// The choice between the kernels of hierarchical tree attention. Those that build the tree and that
// decode belong to both tiers.
#include "htree/htree.h"

namespace jax_dsa {

cudaError_t launch_htree_fwd(const HTreeFwdParams& p, cudaStream_t stream) {
  return launch_tier(
      [&](const Device&) { return hopper::launch_htree_fwd(p, stream); },
      [&](const Device& device) { return portable::launch_htree_fwd(p, device, stream); });
}

cudaError_t launch_htree_bwd(const HTreeBwdParams& p, cudaStream_t stream) {
  return launch_tier(
      [&](const Device&) { return hopper::launch_htree_bwd(p, stream); },
      [&](const Device& device) { return portable::launch_htree_bwd(p, device, stream); });
}

}  // namespace jax_dsa
