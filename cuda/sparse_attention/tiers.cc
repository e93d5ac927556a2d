// The choice between the kernels of sparse attention.
#include "sparse_attention/decode.h"
#include "sparse_attention/sparse_attention.h"

namespace jax_dsa {

cudaError_t launch_sparse_attention_fwd(const SparseAttentionFwdParams& p, cudaStream_t stream) {
  return launch_tier([&](const Device&) { return hopper::launch_sparse_attention_fwd(p, stream); },
                     [&](const Device& device) {
                       return portable::launch_sparse_attention_fwd(p, device, stream);
                     });
}

cudaError_t launch_sparse_attention_bwd(const SparseAttentionBwdParams& p, cudaStream_t stream) {
  return launch_tier([&](const Device&) { return hopper::launch_sparse_attention_bwd(p, stream); },
                     [&](const Device& device) {
                       return portable::launch_sparse_attention_bwd(p, device, stream);
                     });
}

cudaError_t launch_sparse_attention_decode(const SparseAttentionDecodeParams& p,
                                           cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (!is_valid(p)) return cudaErrorInvalidValue;
  return launch_tier(
      [&](const Device&) { return hopper::launch_sparse_attention_decode(p, stream); },
      [&](const Device& device) {
        return portable::launch_sparse_attention_decode(p, device, stream);
      });
}

}  // namespace jax_dsa
