// What the launchers of the masked attention backward kernels of both tiers share.
#pragma once

#include "common/error.h"
#include "masked_attention/bwd_rows.cuh"
#include "masked_attention/launch.h"

namespace jax_dsa::masked_attention {

// Returns kD of the kernel template that handles these dims.
inline int template_dim(const MaskedAttentionBwdParams& p) {
  if (p.dim <= 64 && p.value_dim <= 64) return 64;
  if (p.dim > 192 || p.value_dim > 128) return 256;
  return p.dim <= 128 ? 128 : p.bias.x ? 256 : 192;
}

// Launches the kernels that compute the bounds of all tiles and the order of the work tiles.
template <int kKeys>
cudaError_t plan_work_tiles(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                            BwdTileScheduler* scheduler, Bounds* bounds, cudaStream_t stream) {
  if (scheduler->work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(find_bounds<kQueryTile>(p, w.queries, w.segments, bounds, stream));
  const int64_t blocks = ceil_div(scheduler->work_tiles, int64_t{kKeyBoundsThreads / 32});
  if (bounds->queries) {
    DSA_RETURN_IF_CUDA_ERROR(launch_blocks(
        key_bounds_kernel<kKeys>, blocks, kKeyBoundsThreads, 0, stream, p.mask, *bounds,
        scheduler->work_tiles, p.queries, static_cast<int>(p.keys), p.heads, p.groups, w.keys));
  }
  // Without a block mask, the first keys have the most queries as a rule, and neighbouring keys
  // share theirs, so the natural order is good. With a block mask, sort the key tiles by weight.
  if (p.mask.map_rows && !p.deterministic) {
    DSA_RETURN_IF_CUDA_ERROR(launch_blocks(order_kernel, blocks, kKeyBoundsThreads, 0, stream,
                                           w.keys, scheduler->work_tiles, scheduler->key_tiles,
                                           w.order));
    scheduler->order = w.order;
  }
  return cudaSuccess;
}

// Launches the kernel that precedes the main kernel; see rows_kernel.
template <DType kType>
cudaError_t launch_rows(const MaskedAttentionBwdParams& p, const BwdWorkspace& w, int dq_dim,
                        float lse_factor, cudaStream_t stream) {
  const int64_t steps = ceil_div(p.queries, int64_t{kStepQueries});
  const int64_t blocks = p.batch * p.heads * steps;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (blocks == 0) return clear(w.tile_counter, 16, stream);
  return launch_blocks(rows_kernel<kType>, blocks, kRowsThreads, sizeof(RowsShared), stream, p, w,
                       steps, dq_dim, lse_factor);
}

// Clears the bias gradients, or their float32 sums, where the main kernel accumulates or skips
// tiles. Runs before the main kernel.
inline cudaError_t clear_bias_gradients(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                                        cudaStream_t stream) {
  if (w.dbias) return clear(w.dbias, num_bias_sums(p) * 4, stream);
  if (!p.bias.x || !has_query_bounds(p.mask)) return cudaSuccess;
  return clear(p.dbias, p.batch * p.heads * p.queries * bias_row(p.keys) * 2, stream);
}

}  // namespace jax_dsa::masked_attention
