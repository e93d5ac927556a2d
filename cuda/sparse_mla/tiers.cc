// The choice between the kernels of sparse MLA.
#include "sparse_mla/sparse_mla.h"
#include "sparse_mla/sparse_mla_decode.h"

namespace jax_dsa {

// The portable backward kernel needs no workspace but the stored rows.
int64_t sparse_mla_bwd_counter_bytes(const SparseMlaBwdParams& p) {
  if constexpr (kHasHopperTier) return hopper::sparse_mla_bwd_counter_bytes(p);
  return 0;
}

int64_t sparse_mla_bwd_p_ds_bytes(const SparseMlaBwdParams& p) {
  if constexpr (kHasHopperTier) return hopper::sparse_mla_bwd_p_ds_bytes(p);
  return 0;
}

int64_t sparse_mla_bwd_order_bytes(const SparseMlaBwdParams& p) {
  if constexpr (kHasHopperTier) return hopper::sparse_mla_bwd_order_bytes(p);
  return 0;
}

cudaError_t launch_sparse_mla_fwd(const SparseMlaFwdParams& p, cudaStream_t stream) {
  return launch_tier(
      [&](const Device&) { return hopper::launch_sparse_mla_fwd(p, stream); },
      [&](const Device& device) { return portable::launch_sparse_mla_fwd(p, device, stream); });
}

cudaError_t launch_sparse_mla_decode(const SparseMlaDecodeParams& p, cudaStream_t stream) {
  return launch_tier(
      [&](const Device&) { return hopper::launch_sparse_mla_decode(p, stream); },
      [&](const Device& device) { return portable::launch_sparse_mla_decode(p, device, stream); });
}

cudaError_t launch_sparse_mla_bwd(const SparseMlaBwdParams& p, cudaStream_t stream) {
  return launch_tier(
      [&](const Device&) { return hopper::launch_sparse_mla_bwd(p, stream); },
      [&](const Device& device) { return portable::launch_sparse_mla_bwd(p, device, stream); });
}

}  // namespace jax_dsa
