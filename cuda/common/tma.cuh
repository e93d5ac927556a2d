// TMA: copies of boxes of a tensor into shared memory, with zeros for what lies outside the tensor.
// The encoder of tensor maps is asked of the driver at run time, so that nothing links libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/ptx.cuh"
#include "common/tensor_box.h"

namespace jax_dsa {

// ---- host --------------------------------------------------------------------------------------

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

// ---- device ------------------------------------------------------------------------------------

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at coordinates (x, y, z[, w]), innermost first; completes on `barrier`.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x,
                                         int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

}  // namespace jax_dsa
