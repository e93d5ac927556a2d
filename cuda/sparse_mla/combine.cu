// Launcher of the kernel that combines the splits of sparse MLA decode.

#include "common/launch.cuh"
#include "sparse_mla/combine.cuh"

namespace jax_dsa::sparse_mla {

cudaError_t launch_combine(const Decode& p, cudaStream_t stream) {
  const int64_t work_tiles = sparse_mla_decode_work_tiles(p.batch, p.queries, p.heads, p.groups);
  return launch_pdl(combine_kernel, work_tiles * row_strips(p) * kCombineCtas, kCombineThreads,
                    sizeof(CombineShared), stream, p);
}

}  // namespace jax_dsa::sparse_mla
