// cuda/common/tensor_map.h for the emulator. A tensor map contains the TensorBox it was made from.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "common/tensor_box.h"

namespace jax_dsa {

inline cudaError_t encode_tensor_map(CUtensorMap* map, CUtensorMapDataType, const TensorBox& x) {
  static_assert(sizeof x <= sizeof *map);
  for (int i = 0; i < x.rank; ++i) {
    if (x.extents[i] == 0) return cudaErrorInvalidValue;  // as the driver does
  }
  memcpy(map, &x, sizeof x);
  return cudaSuccess;
}

}  // namespace jax_dsa
