// Properties of the GPU that a kernel is launched on.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "common/error.h"
#include "common/tier.h"

namespace jax_dsa {

struct Device {
  int num_sms;
  int64_t l2_bytes;        // size of the L2 cache
  int compute_capability;  // 10 * major + minor
  int shared_bytes;        // the most shared memory that a CTA can have
  Tier tier;
};

// Returns the limit of Device::shared_bytes that the environment variable JAX_DSA_SHARED_KIB sets.
// Tests on one GPU take the shared memory of another one from it. It is read once.
inline int shared_bytes_limit() {
  static const int limit = [] {
    const char* const kib = std::getenv("JAX_DSA_SHARED_KIB");
    const int64_t asked = kib == nullptr ? 0 : std::strtoll(kib, nullptr, 10);
    return asked > 0 && asked < 1024 ? static_cast<int>(asked * 1024) : INT32_MAX;
  }();
  return limit;
}

// Gets the properties of the current device. The CUDA runtime answers from memory, so that a cache
// would gain nothing.
inline cudaError_t current_device(Device* device) {
  int id = 0, l2_bytes = 0, major = 0, minor = 0;
  DSA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&id));
  DSA_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&device->num_sms, cudaDevAttrMultiProcessorCount, id));
  DSA_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, id));
  DSA_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id));
  DSA_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id));
  DSA_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id));
  device->l2_bytes = l2_bytes;
  device->compute_capability = 10 * major + minor;
  device->tier = tier_of(device->compute_capability);
  if (device->tier == Tier::kPortable) {
    device->shared_bytes = std::min(device->shared_bytes, shared_bytes_limit());
  }
  return cudaSuccess;
}

// Launches a kernel of the current device's tier: `hopper(device)`, or `portable(device)` if this
// is no Hopper GPU or the Hopper kernel does not cover the call. A launcher returns
// cudaErrorNotSupported for a call that its kernels do not cover, and so does this function if
// neither does.
template <typename Hopper, typename Portable>
cudaError_t launch_tier(const Hopper& hopper, const Portable& portable) {
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  if constexpr (kHasHopperTier) {
    if (device.tier == Tier::kHopper) {
      const cudaError_t status = hopper(device);
      if (status != cudaErrorNotSupported) return status;
    }
  }
  if constexpr (kHasPortableTier) {
    return portable(device);
  } else {
    return cudaErrorNotSupported;
  }
}

}  // namespace jax_dsa
