// Launcher of the kernel that sums stored rows.

#include "common/launch.cuh"
#include "common/types.h"
#include "sparse_mla/sum_rows.cuh"
#include "sparse_mla/sum_rows.h"

namespace jax_dsa::sparse_mla {

cudaError_t launch_sum_rows(const SparseMlaBwdParams& p, int64_t chunk, cudaStream_t stream) {
  const int64_t first_row = p.first_query * sparse_mla_bwd_query_rows(p);
  const int64_t rows = p.queries_at_once * sparse_mla_bwd_query_rows(p), entry = p.keys * p.groups;
  const int64_t first_batch = p.first_query / p.queries,
                end_batch = ceil_div(p.first_query + p.queries_at_once, p.queries);
  const int64_t keys = (end_batch - first_batch) * entry;
  if (rows == 0 || keys == 0) return cudaSuccess;
  const int64_t ctas = ceil_div(keys, int64_t{kSumKeys});
  if (ctas > INT32_MAX || rows > INT32_MAX) return cudaErrorInvalidValue;
  const SumRowsParams sum = {
      .rows = p.rows,
      .order = p.row_order + first_row,
      .key = p.row_key + first_row,
      .dkv = p.dkv + first_batch * entry * p.dim,
      .first_key = chunk * (p.batch * entry + 1) + first_batch * entry,
      .keys = keys,
      .row_count = static_cast<int>(rows),
  };
  const auto kernel = p.dim == 576 ? sum_rows_kernel<576> : sum_rows_kernel<512>;
  return launch_blocks(kernel, ctas, kSumKeys * p.dim / 8, 0, stream, sum);
}

}  // namespace jax_dsa::sparse_mla
