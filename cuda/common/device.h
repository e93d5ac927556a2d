// Properties of the GPU that a kernel is launched on.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/error.h"

namespace jax_dsa {

struct Device {
  int num_sms;
  int64_t l2_bytes;  // size of the L2 cache
};

// Gets the properties of the current device. The CUDA runtime answers from memory, so that a cache
// would gain nothing.
inline cudaError_t current_device(Device* device) {
  int id = 0, l2_bytes = 0;
  DSA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&id));
  DSA_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&device->num_sms, cudaDevAttrMultiProcessorCount, id));
  DSA_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, id));
  device->l2_bytes = l2_bytes;
  return cudaSuccess;
}

}  // namespace jax_dsa
