// Launches the portable sparse MLA forward kernel with given traits.
#pragma once

#include "common/error.h"
#include "common/launch.cuh"
#include "sparse_mla/portable_fwd.cuh"

namespace jax_dsa::sparse_mla {

template <typename Tr, bool kRecords>
cudaError_t launch_portable(const Decode& p, cudaStream_t stream) {
  const auto kernel = portable_fwd_kernel<Tr, kRecords>;
  const int64_t work_tiles = portable_work_tiles<Tr>(p);
  if (work_tiles > INT32_MAX) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(kernel, work_tiles, Tr::kThreads,
                                         sizeof(PortableShared<Tr, kRecords>), stream, p));
  return p.splits > 1 ? launch_combine(p, stream) : cudaSuccess;
}

}  // namespace jax_dsa::sparse_mla
