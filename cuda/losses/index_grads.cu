// Launcher of the backward pass of the indexer's logits at all keys.

#include "common/error.h"
#include "common/launch.cuh"
#include "losses/index_sums.cuh"
#include "losses/losses.h"

namespace jax_dsa {

cudaError_t launch_index_grads(const IndexGradsParams& p, cudaStream_t stream) {
  if (p.keys > INT32_MAX - 4096 || p.queries > INT32_MAX - 4096 || p.heads < 1 ||
      p.heads > kIndexGradsHeads || (p.k_scale == nullptr) != (p.dk_scale == nullptr) ||
      (p.channels != 32 && p.channels != 64 && p.channels != 128)) {
    return cudaErrorInvalidValue;
  }
  const int64_t tokens = p.batch * p.queries, rows = p.batch * p.keys;
  if (tokens > 0) {
    DSA_RETURN_IF_CUDA_ERROR(
        launch_blocks(index_grads::clear_queries_kernel, tokens, 256, 0, stream, p));
  }
  if (tokens > 0 && rows > 0) {
    DSA_RETURN_IF_CUDA_ERROR(launch_index_products(p, stream));
  }
  if (rows == 0) return cudaSuccess;
  return launch_blocks(index_grads::sum_segments_kernel, ceil_div(rows, int64_t{8}), 256, 0, stream,
                       p);
}

}  // namespace jax_dsa
