// Replaces cuda/common/launch.cuh for NVRTC, which compiles no host code.
#pragma once

#include "common/device.h"
#include "common/limits.h"

namespace jax_dsa {

template <typename... Params>
cudaError_t launch_blocks(Params...);
template <typename... Params>
cudaError_t launch_clusters(Params...);

}  // namespace jax_dsa
