// Launcher of the portable forward pass.

#include "htree/launch.cuh"
#include "htree/portable_walk.cuh"

namespace jax_dsa::portable {

cudaError_t launch_htree_fwd(const HTreeFwdParams& p, const Device& device, cudaStream_t stream) {
  return htree::launch_fwd<htree::PortableScoresShape, htree::PortableAttendShape>(
      p, device.shared_bytes, stream);
}

}  // namespace jax_dsa::portable
