// Launcher of the backward pass of the indexer's logits at all keys.

#include "common/error.h"
#include "common/launch.cuh"
#include "losses/index_grads.cuh"
#include "losses/losses.h"

namespace jax_dsa {
namespace {

template <int kC>
cudaError_t launch(const IndexGradsParams& p, cudaStream_t stream) {
  using namespace index_grads;
  const int64_t query_pairs = p.batch * ceil_div(p.queries, int64_t{2});
  const int64_t key_tiles = ceil_div(p.queries, int64_t{kIndexGradsSegment}) * p.batch *
                            ceil_div(p.keys, int64_t{kIndexGradsKeys});
  if (query_pairs > INT32_MAX - 4096 || key_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(launch_persistent<Shared<kC>>(index_grads_kernel<kC, Gradient::kQueries>,
                                                         query_pairs, kThreads, stream, p));
  return launch_persistent<Shared<kC>>(index_grads_kernel<kC, Gradient::kKeys>, key_tiles, kThreads,
                                       stream, p);
}

}  // namespace

cudaError_t launch_index_grads(const IndexGradsParams& p, cudaStream_t stream) {
  if (p.keys > INT32_MAX - 4096 || p.queries > INT32_MAX - 4096 || p.heads < 1 ||
      p.heads > index_grads::kRows || (p.k_scale == nullptr) != (p.dk_scale == nullptr) ||
      (p.channels != 32 && p.channels != 64 && p.channels != 128)) {
    return cudaErrorInvalidValue;
  }
  const int64_t tokens = p.batch * p.queries, rows = p.batch * p.keys;
  if (tokens > 0) {
    DSA_RETURN_IF_CUDA_ERROR(
        launch_blocks(index_grads::clear_queries_kernel, tokens, 256, 0, stream, p));
  }
  if (tokens > 0 && rows > 0) {
    const cudaError_t e = p.channels == 128 ? launch<128>(p, stream) : launch<64>(p, stream);
    if (e != cudaSuccess) return e;
  }
  if (rows == 0) return cudaSuccess;
  return launch_blocks(index_grads::sum_segments_kernel, ceil_div(rows, int64_t{8}), 256, 0, stream,
                       p);
}

}  // namespace jax_dsa
