// Launcher of the Hopper forward pass.

#include "htree/launch.cuh"

namespace jax_dsa::hopper {

cudaError_t launch_htree_fwd(const HTreeFwdParams& p, cudaStream_t stream) {
  return htree::launch_fwd<htree::ScoresShape, htree::AttendShape>(p, kMaxSharedBytes, stream);
}

}  // namespace jax_dsa::hopper
