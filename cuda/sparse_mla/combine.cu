// Launcher of the kernel that combines KV splits.

#include "common/launch.cuh"
#include "sparse_mla/combine.cuh"

cudaError_t jax_dsa::sparse_mla::launch_combine(const Decode& p, int64_t ctas,
                                                cudaStream_t stream) {
  return launch_pdl(combine_kernel, ctas, kCombineThreads, sizeof(CombineShared), stream, p);
}
