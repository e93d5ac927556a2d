// Launches the portable masked attention forward kernel with given traits.
#pragma once

#include "common/error.h"
#include "masked_attention/launch.h"
#include "masked_attention/portable_fwd.cuh"

namespace jax_dsa::masked_attention {

template <typename Tr>
cudaError_t launch_portable(const MaskedAttentionFwdParams& p, const Device& device,
                            cudaStream_t stream) {
  const TileScheduler scheduler(p, p.heads, Tr::kQueries, device.l2_bytes);
  if (scheduler.work_tiles > INT32_MAX) return cudaErrorInvalidValue;
  auto* const queries = static_cast<QueryBounds*>(p.workspace);
  auto* const segments = reinterpret_cast<SegmentBounds*>(queries + bounded_query_tiles(p));
  Bounds bounds;
  DSA_RETURN_IF_CUDA_ERROR(find_bounds<kQueryTile>(p, queries, segments, &bounds, stream));
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(portable_fwd_kernel<Tr>, kMaxSharedBytes / 1024));
  return launch_blocks(portable_fwd_kernel<Tr>, scheduler.work_tiles, Tr::kThreads,
                       sizeof(PortableFwdShared<Tr>), stream, p, scheduler, bounds);
}

}  // namespace jax_dsa::masked_attention
