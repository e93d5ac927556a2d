// cuda/common/device.h for the emulator.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/error.h"
#include "common/tier.h"
#include "emulator.h"

namespace jax_dsa {

struct Device {
  int num_sms;
  int64_t l2_bytes;
  int compute_capability;
  int shared_bytes;
  Tier tier;
};

// A device so small that a few queries take several rounds, and a few keys several partitions. The
// GPU of the next launches is emulator::machine.gpu.
inline cudaError_t current_device(Device* device) {
  const emulator::Gpu& gpu = emulator::machine.gpu;
  *device = {emulator::machine.num_sms, 4, gpu.compute_capability, gpu.shared_bytes,
             gpu.compute_capability == kHopper ? Tier::kHopper : Tier::kPortable};
  return cudaSuccess;
}

template <typename Hopper, typename Portable>
cudaError_t launch_tier(const Hopper& hopper, const Portable& portable) {
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  if (device.tier == Tier::kHopper) {
    const cudaError_t status = hopper(device);
    if (status != cudaErrorNotSupported) return status;
  }
  return portable(device);
}

}  // namespace jax_dsa
