// Launcher of the portable masked attention backward kernel.

#include "masked_attention/masked_attention.h"

namespace jax_dsa::portable {

int64_t masked_attention_bwd_workspace_bytes(const MaskedAttentionBwdParams&) { return 0; }

cudaError_t launch_masked_attention_bwd(const MaskedAttentionBwdParams&, const Device&,
                                        cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace jax_dsa::portable
