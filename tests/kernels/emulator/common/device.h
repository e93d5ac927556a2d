// cuda/common/device.h for the emulator.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/error.h"
#include "emulator.h"

namespace jax_dsa {

struct Device {
  int num_sms;
  int64_t l2_bytes;
};

// A device so small that a few queries take several rounds, and a few keys several partitions.
inline cudaError_t current_device(Device* device) {
  *device = {emulator::machine.num_sms, 4};
  return cudaSuccess;
}

}  // namespace jax_dsa
