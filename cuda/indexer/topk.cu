// Selects keys without holding all logits in memory. The indexer's and the top-k kernels run
// alternately, each time over as many queries as fit in the workspace.

#include "common/device.h"
#include "common/error.h"
#include "indexer/chunks.h"
#include "indexer/indexer.h"
#include "topk/topk.h"

namespace jax_dsa {

cudaError_t launch_indexer_topk(const IndexerTopkParams& p, cudaStream_t stream) {
  const int64_t keys = p.logits.keys;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  // A chunk is a multiple of what occupies all SMs in top-k, if possible, and of 8 queries, the
  // work tile of the indexer at 64 heads.
  const int64_t fit = p.capacity / std::max<int64_t>(keys, 1);
  const int64_t wave = int64_t{device.num_sms} * kTopkWideCtasPerSm;
  const auto select = [&](IndexerFwdParams chunk, int64_t token) {
    chunk.whole_rows = false;  // Top-k reads only within the ranges.
    DSA_RETURN_IF_CUDA_ERROR(launch_indexer_fwd(chunk, stream));
    const TopkParams selection = {
        .logits = chunk.out,
        .starts = chunk.starts,
        .ends = chunk.ends,
        .indices = p.indices + token * p.k,
        .values = p.values + token * p.k,
        .rows = chunk.batch * chunk.queries,
        .size = keys,
        .k = p.k,
    };
    return launch_topk(selection, stream);
  };
  return indexer::for_each_chunk(p.logits, fit, wave, 8, select);
}

}  // namespace jax_dsa
