// Launcher of the attn_dist forward kernel.

#include "attn_dist/attn_dist.h"
#include "attn_dist/fwd.cuh"
#include "common/launch.cuh"

namespace jax_dsa {
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
  if (p.groups <= 0 || p.heads % p.groups != 0 || p.head_group <= 0 ||
      p.heads / p.groups % p.head_group != 0) {
    return cudaErrorInvalidValue;
  }
  switch (p.dim) {
    case 576:
      return launch<576>(p, stream);
    case 512:
      return launch<512>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa
