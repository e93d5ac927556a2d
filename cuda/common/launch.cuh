// Launching kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace jax_dsa {

inline constexpr int kMaxSharedBytes = 227 * 1024;  // of a block
inline constexpr int kReservedSharedBytes = 1024;   // of each block, beside its own

inline cudaError_t processor_count(int* count) {
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

// With so much dynamic shared memory.
template <typename... Params>
cudaError_t launch_blocks(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes,
                          cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  if (cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      e != cudaSuccess) {
    return e;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(params...);
  return cudaGetLastError();
}

// Persistent kernels, whose blocks share out the work themselves: as many as run at a time,
// `kBlocks` a multiprocessor, fewer if there are fewer pieces of work; `Shared` is the
// kernel's dynamic shared memory.
template <typename Shared, int kBlocks = 1, typename... Params>
cudaError_t launch_persistent(void (*kernel)(Params...), int64_t pieces, int threads,
                              cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  static_assert(kBlocks * (sizeof(Shared) + kReservedSharedBytes) <=
                kMaxSharedBytes + kReservedSharedBytes);
  int processors = 0;
  if (cudaError_t e = processor_count(&processors); e != cudaSuccess) return e;
  return launch_blocks(kernel, std::min(pieces, int64_t{kBlocks} * processors), threads,
                       static_cast<int>(sizeof(Shared)), stream, params...);
}

}  // namespace jax_dsa
