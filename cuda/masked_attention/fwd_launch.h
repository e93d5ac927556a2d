// Launches the masked attention forward kernel with given traits.
#pragma once

#include "common/error.h"
#include "masked_attention/fwd.cuh"
#include "masked_attention/launch.h"

namespace jax_dsa::masked_attention {

// The tile counter occupies the first 16 bytes of the workspace; the bounds follow.
inline constexpr int64_t kTileCounterBytes = 16;

template <typename Tr>
cudaError_t launch(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const TileScheduler scheduler(p, p.heads, Tr::kRows, device.l2_bytes);
  if (scheduler.work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.workspace, kTileCounterBytes, stream));
  auto* const queries =
      reinterpret_cast<QueryBounds*>(static_cast<char*>(p.workspace) + kTileCounterBytes);
  auto* const segments = reinterpret_cast<SegmentBounds*>(queries + bounded_query_tiles(p));
  Bounds bounds;
  DSA_RETURN_IF_CUDA_ERROR(find_bounds<Tr::kRows>(p, queries, segments, &bounds, stream));
  CUtensorMap q_map, k_map, v_map;
  DSA_RETURN_IF_CUDA_ERROR(
      encode_rows(&q_map, p.dtype, p.q, p.batch, p.queries, p.heads, p.dim, Tr::kRows));
  DSA_RETURN_IF_CUDA_ERROR(
      encode_rows(&k_map, p.dtype, p.k, p.batch, p.keys, p.groups, p.dim, Tr::kKeys));
  DSA_RETURN_IF_CUDA_ERROR(
      encode_rows(&v_map, p.dtype, p.v, p.batch, p.keys, p.groups, p.value_dim, Tr::kKeys));
  CUtensorMap bias_map;
  DSA_RETURN_IF_CUDA_ERROR(encode_bias(&bias_map, p, p.bias.x, Tr::kRows));
  return launch_persistent<Shared<Tr>>(fwd_kernel<Tr>, scheduler.work_tiles, Tr::kThreads, stream,
                                       p, scheduler, bounds, q_map, k_map, v_map, bias_map);
}

}  // namespace jax_dsa::masked_attention
