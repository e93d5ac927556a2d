// Launches kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/device.h"
#include "common/limits.h"

namespace jax_dsa {

// Sets how many KiB of an SM's combined memory a kernel prefers as shared memory. The rest is the
// L1 cache. The share is that of Hopper's memory.
template <typename... Params>
cudaError_t prefer_shared_memory(void (*kernel)(Params...), int kib) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              kib * 100 / (kMaxSharedBytes / 1024 + 1));
}

// Allows a kernel `shared_bytes` of dynamic shared memory. Without this the limit is 48 KiB.
template <typename... Params>
cudaError_t allow_shared_memory(void (*kernel)(Params...), int shared_bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

// Launches a one-dimensional grid of independent CTAs.
template <typename... Params>
cudaError_t launch_blocks(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes,
                          cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  DSA_RETURN_IF_CUDA_ERROR(allow_shared_memory(kernel, shared_bytes));
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(params...);
  return cudaGetLastError();
}

// Launches a one-dimensional grid with a launch attribute.
template <typename... Params>
cudaError_t launch_with(const cudaLaunchAttribute& attribute, void (*kernel)(Params...),
                        int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                        const std::type_identity_t<Params>&... params) {
  DSA_RETURN_IF_CUDA_ERROR(allow_shared_memory(kernel, shared_bytes));
  cudaLaunchAttribute attributes[] = {attribute};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

// Launches a grid with programmatic dependent launch. It starts once all CTAs of the preceding
// kernel in the stream have called launch_dependents or have ended, and must call
// grid_dependency_wait before it reads that kernel's results. Code that was compiled for GPUs
// before sm_90 does not wait, whichever GPU runs it, so its launch is an ordinary one.
template <typename... Params>
cudaError_t launch_pdl(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes,
                       cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  cudaFuncAttributes code = {};
  DSA_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&code, kernel));
  if (code.ptxVersion < 90) {
    return launch_blocks(kernel, blocks, threads, shared_bytes, stream, params...);
  }
  cudaLaunchAttribute serialization = {};
  serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  serialization.val.programmaticStreamSerializationAllowed = 1;
  return launch_with(serialization, kernel, blocks, threads, shared_bytes, stream, params...);
}

// Allows a kernel clusters of more than kPortableClusterSize CTAs.
template <typename... Params>
cudaError_t allow_large_clusters(void (*kernel)(Params...)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// Gets whether the current device has room for a cluster of `ranks` CTAs of this kernel. A slice of
// a GPU may have none for a large one.
template <typename... Params>
cudaError_t cluster_fits(void (*kernel)(Params...), int ranks, int threads, int shared_bytes,
                         bool* fits) {
  *fits = ranks <= kPortableClusterSize;
  if (*fits) return cudaSuccess;
  DSA_RETURN_IF_CUDA_ERROR(allow_shared_memory(kernel, shared_bytes));
  DSA_RETURN_IF_CUDA_ERROR(allow_large_clusters(kernel));
  cudaLaunchConfig_t config = {};
  config.gridDim = ranks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  int size = 0;
  DSA_RETURN_IF_CUDA_ERROR(
      cudaOccupancyMaxPotentialClusterSize(&size, reinterpret_cast<const void*>(kernel), &config));
  *fits = ranks <= size;
  return cudaSuccess;
}

// Launches clusters of `ranks` CTAs each.
template <typename... Params>
cudaError_t launch_clusters(void (*kernel)(Params...), int64_t clusters, int ranks, int threads,
                            int shared_bytes, cudaStream_t stream,
                            const std::type_identity_t<Params>&... params) {
  if (ranks > kPortableClusterSize) DSA_RETURN_IF_CUDA_ERROR(allow_large_clusters(kernel));
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
  return launch_with(cluster, kernel, clusters * ranks, threads, shared_bytes, stream, params...);
}

// Launches a persistent kernel, whose CTAs divide the work tiles among themselves. The grid has
// kBlocks CTAs per SM, which all run at the same time, or fewer if there are fewer work tiles.
// `Shared` is the struct in the kernel's dynamic shared memory.
template <typename Shared, int kBlocks = 1, typename... Params>
cudaError_t launch_persistent(void (*kernel)(Params...), int64_t work_tiles, int threads,
                              cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  static_assert(shared_memory_fits(kBlocks, sizeof(Shared)));
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  return launch_blocks(kernel, std::min(work_tiles, int64_t{kBlocks} * device.num_sms), threads,
                       static_cast<int>(sizeof(Shared)), stream, params...);
}

// Sets `bytes` bytes to zero, in the stream. There may be none.
inline cudaError_t clear(void* to, int64_t bytes, cudaStream_t stream) {
  return bytes > 0 ? cudaMemsetAsync(to, 0, bytes, stream) : cudaSuccess;
}

}  // namespace jax_dsa
