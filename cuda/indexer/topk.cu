// Selection without all logits in memory: the indexer's and top-k's kernels in turn, over as many
// queries as the workspace has room for.

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
  const int64_t fit = p.capacity / row;  // queries
  if (fit < 1) return cudaErrorInvalidValue;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  // Whole batch entries where one fits, else even parts of one. The parts leave no processor idle
  // in top-k, if they can; indexer items are of 8 queries.
  const int64_t entries = std::max<int64_t>(fit / std::max<int64_t>(all.queries, 1), 1);
  int64_t count = all.queries;
  if (count > fit) {
    const int64_t wave = int64_t{device.num_sms} * kTopkLongRowsAtOnce;
    const int64_t most = fit < wave ? fit : fit / wave * wave;
    const int64_t even = ceil_div(count, ceil_div(count, most));
    count = std::min(ceil_div(even, int64_t{8}) * 8, most);
  }
  const int element = all.dtype == IndexerDType::kBF16 ? 2 : 1;
  for (int64_t batch = 0; batch < all.batch; batch += entries) {
    for (int64_t query = 0; query < all.queries; query += count) {
      const int64_t token = batch * all.queries + query;
      IndexerFwdParams some = all;
      some.whole_rows = false;  // top-k reads what lies within the ranges
      some.batch = std::min(entries, all.batch - batch);
      some.queries = std::min(count, all.queries - query);
      some.q = static_cast<const char*>(all.q) + token * all.heads * all.channels * element;
      some.weights += token * all.heads;
      const bool paged = all.page_table != nullptr;
      if (paged) some.page_table += batch * all.pages_per_request;
      if (!paged || all.pools > 1) {
        const int64_t before = batch * (paged ? int64_t{all.pages} * all.page_size : all.keys);
        some.k = static_cast<const char*>(all.k) + before * all.channels * element;
        if (all.k_scale != nullptr) some.k_scale += before;
        if (paged) some.pools = some.batch;
      }
      some.starts += token;
      some.ends += token;
      DSA_RETURN_IF_CUDA_ERROR(launch_indexer_fwd(some, stream));
      const TopkParams selection = {
          .logits = some.out,
          .starts = some.starts,
          .ends = some.ends,
          .indices = p.indices + token * p.k,
          .values = p.values + token * p.k,
          .rows = some.batch * some.queries,
          .size = all.keys,
          .k = p.k,
      };
      DSA_RETURN_IF_CUDA_ERROR(launch_topk(selection, stream));
    }
  }
  return cudaSuccess;
}

}  // namespace jax_dsa
