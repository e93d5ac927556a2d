// Launches the masked attention forward kernel with given traits.
#pragma once

#include "masked_attention/fwd.cuh"
#include "masked_attention/launch.h"

namespace jax_dsa::masked_attention {

// The ticket has 16 bytes of its own; the bounds follow.
inline constexpr int64_t kTicketBytes = 16;

template <typename Tr>
cudaError_t launch(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  Device device;
  if (cudaError_t e = current_device(&device); e != cudaSuccess) return e;
  const Work work(p, device.l2_bytes);
  if (work.items > INT32_MAX - 4096) return cudaErrorInvalidValue;
  if (cudaError_t e = clear(p.workspace, kTicketBytes, stream); e != cudaSuccess) return e;
  auto* const queries =
      reinterpret_cast<QueryBounds*>(static_cast<char*>(p.workspace) + kTicketBytes);
  auto* const segments = reinterpret_cast<SegmentBounds*>(queries + bounded_query_tiles(p));
  Bounds bounds;
  if (cudaError_t e = find_bounds(p, queries, segments, &bounds, stream); e != cudaSuccess) {
    return e;
  }
  CUtensorMap q_map, k_map, v_map;
  if (cudaError_t e =
          encode_rows(&q_map, p.dtype, p.q, p.batch, p.queries, p.heads, p.dim, kQueryTile);
      e != cudaSuccess) {
    return e;
  }
  if (cudaError_t e =
          encode_rows(&k_map, p.dtype, p.k, p.batch, p.keys, p.groups, p.dim, Tr::kKeys);
      e != cudaSuccess) {
    return e;
  }
  if (cudaError_t e =
          encode_rows(&v_map, p.dtype, p.v, p.batch, p.keys, p.groups, p.value_dim, Tr::kKeys);
      e != cudaSuccess) {
    return e;
  }
  CUtensorMap bias_map;
  if (cudaError_t e = encode_bias(&bias_map, p, p.bias.x, kQueryTile); e != cudaSuccess) return e;
  return launch_persistent<Shared<Tr>>(fwd_kernel<Tr>, work.items, kThreads, stream, p, work,
                                       bounds, q_map, k_map, v_map, bias_map);
}

}  // namespace jax_dsa::masked_attention
