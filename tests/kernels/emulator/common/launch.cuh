// cuda/common/launch.cuh for the emulator.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/device.h"
#include "common/limits.h"

namespace jax_dsa {

template <typename... Params>
cudaError_t prefer_shared_memory(void (*)(Params...), int) {
  return cudaSuccess;
}

template <typename... Params>
cudaError_t launch_blocks(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes,
                          cudaStream_t, const std::type_identity_t<Params>&... params) {
  emulator::launch_in_turn(blocks, threads, shared_bytes, [&] { kernel(params...); });
  return cudaSuccess;
}

template <typename... Params>
cudaError_t launch_pdl(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes,
                       cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  return launch_blocks(kernel, blocks, threads, shared_bytes, stream, params...);
}

template <typename... Params>
cudaError_t cluster_fits(void (*)(Params...), int ranks, int, int, bool* fits) {
  *fits = ranks <= emulator::machine.max_cluster_size;
  return cudaSuccess;
}

template <typename... Params>
cudaError_t launch_clusters(void (*kernel)(Params...), int64_t clusters, int ranks, int threads,
                            int shared_bytes, cudaStream_t,
                            const std::type_identity_t<Params>&... params) {
  emulator::launch_clusters(clusters, ranks, threads, shared_bytes, [&] { kernel(params...); });
  return cudaSuccess;
}

// The emulator runs one CTA per SM, whatever kBlocks is.
template <typename Shared, int kBlocks = 1, typename... Params>
cudaError_t launch_persistent(void (*kernel)(Params...), int64_t work_tiles, int threads,
                              cudaStream_t, const std::type_identity_t<Params>&... params) {
  static_assert(shared_memory_fits(kBlocks, sizeof(Shared)));
  emulator::launch(std::min(work_tiles, int64_t{emulator::machine.num_sms}), threads,
                   sizeof(Shared), [&] { kernel(params...); });
  return cudaSuccess;
}

inline cudaError_t clear(void* to, int64_t bytes, cudaStream_t) {
  if (bytes > 0) memset(to, 0, bytes);
  return cudaSuccess;
}

}  // namespace jax_dsa
