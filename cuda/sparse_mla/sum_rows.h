// The launcher of the kernel that sums stored rows (sum_rows.cu).
#pragma once

#include "sparse_mla/sparse_mla.h"

namespace jax_dsa::sparse_mla {

// Adds the stored rows of the current queries, which are chunk `chunk` of all queries, to the keys
// of their batch entries.
cudaError_t launch_sum_rows(const SparseMlaBwdParams& p, int64_t chunk, cudaStream_t stream);

}  // namespace jax_dsa::sparse_mla
