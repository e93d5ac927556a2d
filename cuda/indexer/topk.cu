// Selects keys without holding all logits in memory. The indexer's and the top-k kernels run
// alternately, each time over as many queries as fit in the workspace.

#include <algorithm>

#include "common/device.h"
#include "common/error.h"
#include "common/types.h"
#include "indexer/indexer.h"
#include "topk/topk.h"

namespace jax_dsa {

cudaError_t launch_indexer_topk(const IndexerTopkParams& p, cudaStream_t stream) {
  const IndexerFwdParams& all = p.logits;
  const int64_t row = std::max<int64_t>(all.keys, 1);
  const int64_t fit = p.capacity / row;  // queries that fit in the workspace
  if (fit < 1) return cudaErrorInvalidValue;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  // Process whole batch entries if one fits, else chunks of about equal size of one entry. If
  // possible, a chunk is a multiple of what occupies all SMs in top-k. Chunks are rounded up to 8
  // queries, the work tile of the indexer at 64 heads.
  const int64_t entries = std::max<int64_t>(fit / std::max<int64_t>(all.queries, 1), 1);
  int64_t count = all.queries;
  if (count > fit) {
    const int64_t wave = int64_t{device.num_sms} * kTopkWideCtasPerSm;
    const int64_t max_count = fit < wave ? fit : fit / wave * wave;
    const int64_t even_count = ceil_div(count, ceil_div(count, max_count));
    count = std::min(ceil_div(even_count, int64_t{8}) * 8, max_count);
  }
  const int element = all.dtype == IndexerDType::kBF16 ? 2 : 1;
  for (int64_t batch = 0; batch < all.batch; batch += entries) {
    for (int64_t query = 0; query < all.queries; query += count) {
      const int64_t token = batch * all.queries + query;
      IndexerFwdParams chunk = all;
      chunk.whole_rows = false;  // Top-k reads only within the ranges.
      chunk.batch = std::min(entries, all.batch - batch);
      chunk.queries = std::min(count, all.queries - query);
      chunk.q = static_cast<const char*>(all.q) + token * all.heads * all.channels * element;
      chunk.weights += token * all.heads;
      const bool paged = all.page_table != nullptr;
      if (paged) chunk.page_table += batch * all.pages_per_request;
      if (!paged || all.pools > 1) {
        const int64_t before = batch * (paged ? int64_t{all.pages} * all.page_size : all.keys);
        chunk.k = static_cast<const char*>(all.k) + before * all.channels * element;
        if (all.k_scale != nullptr) chunk.k_scale += before;
        if (paged) chunk.pools = chunk.batch;
      }
      chunk.starts += token;
      chunk.ends += token;
      DSA_RETURN_IF_CUDA_ERROR(launch_indexer_fwd(chunk, stream));
      const TopkParams selection = {
          .logits = chunk.out,
          .starts = chunk.starts,
          .ends = chunk.ends,
          .indices = p.indices + token * p.k,
          .values = p.values + token * p.k,
          .rows = chunk.batch * chunk.queries,
          .size = all.keys,
          .k = p.k,
      };
      DSA_RETURN_IF_CUDA_ERROR(launch_topk(selection, stream));
    }
  }
  return cudaSuccess;
}

}  // namespace jax_dsa
