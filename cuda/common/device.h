// The device that a launch is for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

struct Device {
  int processors;
  int64_t l2_bytes;
};

// The current one. The runtime answers from memory: there is nothing to gain by a cache.
inline cudaError_t current_device(Device* device) {
  int id = 0, l2_bytes = 0;
  if (cudaError_t e = cudaGetDevice(&id); e != cudaSuccess) return e;
  if (cudaError_t e =
          cudaDeviceGetAttribute(&device->processors, cudaDevAttrMultiProcessorCount, id);
      e != cudaSuccess) {
    return e;
  }
  if (cudaError_t e = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, id);
      e != cudaSuccess) {
    return e;
  }
  device->l2_bytes = l2_bytes;
  return cudaSuccess;
}

}  // namespace jax_dsa
