// Launching persistent kernels: as many blocks as run at a time, which share out the work
// themselves.
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

// `kBlocks` blocks a multiprocessor, fewer if there are fewer pieces of work; `Shared` is the
// kernel's dynamic shared memory.
template <typename Shared, int kBlocks = 1, typename... Params>
cudaError_t launch_persistent(void (*kernel)(Params...), int64_t pieces, int threads,
                              cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  static_assert(kBlocks * (sizeof(Shared) + kReservedSharedBytes) <=
                kMaxSharedBytes + kReservedSharedBytes);
  int processors = 0;
  if (cudaError_t e = processor_count(&processors); e != cudaSuccess) return e;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(sizeof(Shared)));
      e != cudaSuccess) {
    return e;
  }
  const auto grid = static_cast<unsigned>(std::min<int64_t>(pieces, int64_t{kBlocks} * processors));
  kernel<<<grid, threads, sizeof(Shared), stream>>>(params...);
  return cudaGetLastError();
}

}  // namespace jax_dsa
