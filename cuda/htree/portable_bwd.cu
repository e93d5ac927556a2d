// Launcher of the portable backward pass.

#include "htree/bwd_launch.cuh"
#include "htree/portable_walk.cuh"

namespace jax_dsa::portable {

cudaError_t launch_htree_bwd(const HTreeBwdParams& p, const Device& device, cudaStream_t stream) {
  return htree::launch_bwd<htree::PortableBwdShape>(p, device.shared_bytes, stream);
}

}  // namespace jax_dsa::portable
