// Divides a selection into chunks whose logits or scores fit in a workspace.
#pragma once

#include <algorithm>

#include "common/error.h"
#include "common/types.h"
#include "indexer/indexer.h"

namespace jax_dsa::indexer {

// Calls `body(chunk, token)` for parts of the queries, at most `fit` at a time, where `token` is
// the index of the first query. A chunk has whole batch entries if one fits, else part of one. In
// the latter case the chunks of an entry have about equal size, which is a multiple of `step`, and
// they have no more queries than the largest multiple of `wave` that fits.
template <typename Body>
cudaError_t for_each_chunk(const IndexerFwdParams& all, int64_t fit, int64_t wave, int64_t step,
                           const Body& body) {
  if (fit < 1) return cudaErrorInvalidValue;
  const int64_t entries = std::max<int64_t>(fit / std::max<int64_t>(all.queries, 1), 1);
  int64_t count = all.queries;
  if (count > fit) {
    const int64_t max_count = fit < wave ? fit : fit / wave * wave;
    const int64_t even_count = ceil_div(count, ceil_div(count, max_count));
    count = std::min(ceil_div(even_count, step) * step, max_count);
  }
  const int element = all.dtype == IndexerDType::kBF16 ? 2 : 1;
  for (int64_t batch = 0; batch < all.batch; batch += entries) {
    for (int64_t query = 0; query < all.queries; query += count) {
      const int64_t token = batch * all.queries + query;
      IndexerFwdParams chunk = all;
      chunk.batch = std::min(entries, all.batch - batch);
      chunk.queries = std::min(count, all.queries - query);
      chunk.q = static_cast<const char*>(all.q) + token * all.heads * all.channels * element;
      if (all.weights != nullptr) chunk.weights += token * all.heads;
      const bool paged = all.page_table != nullptr;
      if (paged) chunk.page_table += batch * all.pages_per_request;
      if (!paged || all.pools > 1) {
        const int64_t before = batch * (paged ? int64_t{all.pages} * all.page_size : all.keys);
        chunk.k = static_cast<const char*>(all.k) + before * all.channels * element;
        if (all.k_scale != nullptr) chunk.k_scale += before;
        if (paged) chunk.pools = chunk.batch;
      }
      if (all.starts != nullptr) chunk.starts += token;
      chunk.ends += token;
      DSA_RETURN_IF_CUDA_ERROR(body(chunk, token));
    }
  }
  return cudaSuccess;
}

}  // namespace jax_dsa::indexer
