// The choice between the kernels of masked attention.
#include <algorithm>

#include "masked_attention/masked_attention.h"

namespace jax_dsa {

int64_t masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams& p) {
  int64_t bytes = 0;
  if constexpr (kHasHopperTier) bytes = hopper::masked_attention_fwd_workspace_bytes(p);
  if constexpr (kHasPortableTier) {
    bytes = std::max(bytes, portable::masked_attention_fwd_workspace_bytes(p));
  }
  return bytes;
}

int64_t masked_attention_bwd_workspace_bytes(const MaskedAttentionBwdParams& p) {
  int64_t bytes = 0;
  if constexpr (kHasHopperTier) bytes = hopper::masked_attention_bwd_workspace_bytes(p);
  if constexpr (kHasPortableTier) {
    bytes = std::max(bytes, portable::masked_attention_bwd_workspace_bytes(p));
  }
  return bytes;
}

cudaError_t launch_masked_attention_fwd(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  return launch_tier([&](const Device&) { return hopper::launch_masked_attention_fwd(p, stream); },
                     [&](const Device& device) {
                       return portable::launch_masked_attention_fwd(p, device, stream);
                     });
}

cudaError_t launch_masked_attention_bwd(const MaskedAttentionBwdParams& p, cudaStream_t stream) {
  return launch_tier([&](const Device&) { return hopper::launch_masked_attention_bwd(p, stream); },
                     [&](const Device& device) {
                       return portable::launch_masked_attention_bwd(p, device, stream);
                     });
}

}  // namespace jax_dsa
