// Launching kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/device.h"
#include "common/limits.h"

namespace jax_dsa {

// How much of a SM's memory a kernel prefers to be shared memory, in KiB; the rest is
// L1.
template <typename... Params>
cudaError_t prefer_shared_memory(void (*kernel)(Params...), int kib) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              kib * 100 / (kMaxSharedBytes / 1024 + 1));
}

// Blocks that know nothing of each other, with so much dynamic shared memory each.
template <typename... Params>
cudaError_t launch_blocks(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes,
                          cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  DSA_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(params...);
  return cudaGetLastError();
}

// The same with an attribute of the launch.
template <typename... Params>
cudaError_t launch_with(const cudaLaunchAttribute& attribute, void (*kernel)(Params...),
                        int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                        const std::type_identity_t<Params>&... params) {
  DSA_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
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

// Blocks that may begin while the stream's kernel before runs: as soon as all of its blocks have
// called `launch_dependents`. They wait for its results by `grid_dependency_wait`.
template <typename... Params>
cudaError_t launch_pdl(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes,
                       cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute behind = {};
  behind.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  behind.val.programmaticStreamSerializationAllowed = 1;
  return launch_with(behind, kernel, blocks, threads, shared_bytes, stream, params...);
}

// Blocks in clusters of `ranks` blocks.
template <typename... Params>
cudaError_t launch_clusters(void (*kernel)(Params...), int64_t clusters, int ranks, int threads,
                            int shared_bytes, cudaStream_t stream,
                            const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute size = {};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
  return launch_with(size, kernel, clusters * ranks, threads, shared_bytes, stream, params...);
}

// Persistent kernels, whose blocks share out the work themselves: as many as run at a time,
// `kBlocks` a SM, fewer if there are fewer pieces of work; `Shared` is the
// kernel's dynamic shared memory.
template <typename Shared, int kBlocks = 1, typename... Params>
cudaError_t launch_persistent(void (*kernel)(Params...), int64_t pieces, int threads,
                              cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  static_assert(shared_memory_fits(kBlocks, sizeof(Shared)));
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  return launch_blocks(kernel, std::min(pieces, int64_t{kBlocks} * device.num_sms), threads,
                       static_cast<int>(sizeof(Shared)), stream, params...);
}

// Zeros, unless there are no bytes.
inline cudaError_t clear(void* to, int64_t bytes, cudaStream_t stream) {
  return bytes > 0 ? cudaMemsetAsync(to, 0, bytes, stream) : cudaSuccess;
}

}  // namespace jax_dsa
