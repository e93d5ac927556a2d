// Encodes tensor maps for TMA. The driver's encoder is looked up at run time, so that the extension
// does not link libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "common/tensor_box.h"

namespace jax_dsa {

inline cudaError_t encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type,
                                     const TensorBox& x) {
  static void* const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      return static_cast<void*>(nullptr);
    }
    return found;
  }();
  if (encode == nullptr) return cudaErrorCallRequiresNewerDriver;
  const cuuint32_t steps[kMaxTensorRank] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle = x.row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : x.row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      map, type, x.rank, const_cast<void*>(x.base), x.extents, x.strides, x.box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_dsa
