// Replaces cuda/common/device.h for NVRTC, which compiles no host code.
#pragma once

#include <cuda_runtime_api.h>

#include "standard.h"

namespace jax_dsa {

struct Device {
  int num_sms;
  int64_t l2_bytes;
};
cudaError_t current_device(Device*);

}  // namespace jax_dsa
