// Launcher of the products in the backward pass of the indexer's logits at all keys.

#include "common/error.h"
#include "common/launch.cuh"
#include "losses/index_grads.cuh"
#include "losses/losses.h"

namespace jax_dsa::hopper {
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

cudaError_t launch_index_products(const IndexGradsParams& p, cudaStream_t stream) {
  return p.channels == 128 ? launch<128>(p, stream) : launch<64>(p, stream);
}

}  // namespace jax_dsa::hopper
