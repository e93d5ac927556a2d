// Launches the masked attention forward kernel with given traits.
#pragma once

#include "common/error.h"
#include "masked_attention/fwd.cuh"
#include "masked_attention/launch.h"

namespace jax_dsa::masked_attention {

// The ticket has 16 bytes of its own; the bounds follow.
inline constexpr int64_t kTicketBytes = 16;

template <typename Tr>
cudaError_t launch(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const Work work(p, device.l2_bytes);
  if (work.items > INT32_MAX - 4096) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.workspace, kTicketBytes, stream));
  auto* const queries =
      reinterpret_cast<QueryBounds*>(static_cast<char*>(p.workspace) + kTicketBytes);
  auto* const segments = reinterpret_cast<SegmentBounds*>(queries + bounded_query_tiles(p));
  Bounds bounds;
  DSA_RETURN_IF_CUDA_ERROR(find_bounds(p, queries, segments, &bounds, stream));
  CUtensorMap q_map, k_map, v_map;
  DSA_RETURN_IF_CUDA_ERROR(
      encode_rows(&q_map, p.dtype, p.q, p.batch, p.queries, p.heads, p.dim, kQueryTile));
  DSA_RETURN_IF_CUDA_ERROR(
      encode_rows(&k_map, p.dtype, p.k, p.batch, p.keys, p.groups, p.dim, Tr::kKeys));
  DSA_RETURN_IF_CUDA_ERROR(
      encode_rows(&v_map, p.dtype, p.v, p.batch, p.keys, p.groups, p.value_dim, Tr::kKeys));
  CUtensorMap bias_map;
  DSA_RETURN_IF_CUDA_ERROR(encode_bias(&bias_map, p, p.bias.x, kQueryTile));
  return launch_persistent<Shared<Tr>>(fwd_kernel<Tr>, work.items, kThreads, stream, p, work,
                                       bounds, q_map, k_map, v_map, bias_map);
}

}  // namespace jax_dsa::masked_attention
