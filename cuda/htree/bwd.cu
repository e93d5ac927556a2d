// Launcher of the Hopper backward pass.

#include "htree/bwd_launch.cuh"

namespace jax_dsa::hopper {

cudaError_t launch_htree_bwd(const HTreeBwdParams& p, cudaStream_t stream) {
  return htree::launch_bwd<htree::BwdShape>(p, kMaxSharedBytes, stream);
}

}  // namespace jax_dsa::hopper
