// Launcher of the attn_dist forward kernel.

#include "attn_dist/attn_dist.h"
#include "attn_dist/fwd.cuh"
#include "common/launch.cuh"

namespace jax_dsa::hopper {
namespace {

template <int kD>
cudaError_t launch(const AttnDistFwdParams& p, cudaStream_t stream) {
  const int64_t work_tiles = attn_dist::work_tile_count(p);
  if (work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  const int64_t tiles = work_tiles * ceil_div(p.slots, kTile);
  return launch_persistent<attn_dist::Shared<kD>>(attn_dist::fwd_kernel<kD>, tiles,
                                                  attn_dist::kThreads, stream, p);
}

}  // namespace

cudaError_t launch_attn_dist_fwd(const AttnDistFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0 || p.slots == 0) return cudaSuccess;
  if (!attn_dist::is_valid(p)) return cudaErrorInvalidValue;
  if (p.dim < 512) return cudaErrorNotSupported;
  return p.dim == 576 ? launch<576>(p, stream) : launch<512>(p, stream);
}

}  // namespace jax_dsa::hopper
