// The choice between the kernels of the indexer's losses.
#include "losses/losses.h"

namespace jax_dsa {

cudaError_t launch_teacher(const TeacherParams& p, cudaStream_t stream) {
  return launch_tier(
      [&](const Device&) { return hopper::launch_teacher(p, stream); },
      [&](const Device& device) { return portable::launch_teacher(p, device, stream); });
}

cudaError_t launch_index_products(const IndexGradsParams& p, cudaStream_t stream) {
  return launch_tier([&](const Device&) { return hopper::launch_index_products(p, stream); },
                     [&](const Device&) { return portable::launch_index_products(p, stream); });
}

}  // namespace jax_dsa
