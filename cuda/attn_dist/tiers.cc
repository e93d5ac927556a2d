// The choice between the kernels of attn_dist.
#include "attn_dist/attn_dist.h"

namespace jax_dsa {

cudaError_t launch_attn_dist_fwd(const AttnDistFwdParams& p, cudaStream_t stream) {
  return launch_tier(
      [&](const Device&) { return hopper::launch_attn_dist_fwd(p, stream); },
      [&](const Device& device) { return portable::launch_attn_dist_fwd(p, device, stream); });
}

}  // namespace jax_dsa
