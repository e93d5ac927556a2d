// Launches the kernels of the FP8 matmul with given traits.
#pragma once

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "fp8/matmul.cuh"
#include "fp8/matmul_few.cuh"

namespace jax_dsa::fp8 {

// Encodes the tensor maps of the operands. Boxes are one stage's tiles.
template <typename Tr>
cudaError_t encode_maps(const Fp8MatmulParams& p, CUtensorMap* a, CUtensorMap* b) {
  DSA_RETURN_IF_CUDA_ERROR(encode_tensor_map(
      a, CU_TENSOR_MAP_DATA_TYPE_UINT8,
      tensor_box<3>(1, p.a, {p.k, p.m, p.batch}, {kBlockK, Tr::kRows / Tr::kClusterSize, 1})));
  return encode_tensor_map(b, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                           tensor_box<3>(1, p.b, {p.k, p.n, p.batch}, {kBlockK, Tr::kColumns, 1}));
}

// Encodes the tensor map of the product, with boxes of 8 rows of 128 bytes.
inline cudaError_t encode_out(const Fp8MatmulParams& p, CUtensorMap* out) {
  if (!stored_by_tma(p)) return cudaSuccess;
  const int bytes = p.dtype == DType::kF32 ? 4 : 2;
  return encode_tensor_map(
      out, bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
      tensor_box<3>(bytes, p.out, {p.n, p.m, p.batch}, {128 / bytes, 8, 1}));
}

// The kernel for many rows.
template <typename Tr>
cudaError_t launch(const Fp8MatmulParams& p, cudaStream_t stream) {
  static_assert(shared_memory_fits(Tr::kCtasPerSm, sizeof(Shared<Tr>)));
  CUtensorMap a, b, out = {};
  DSA_RETURN_IF_CUDA_ERROR(encode_maps<Tr>(p, &a, &b));
  DSA_RETURN_IF_CUDA_ERROR(encode_out(p, &out));
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const Tiles<Tr> tiles(p);
  const int clusters = std::min(tiles.all, std::max(device.num_sms / Tr::kClusterSize, 1));
  return launch_clusters(matmul_kernel<Tr>, clusters, Tr::kClusterSize, Tr::kThreads,
                         sizeof(Shared<Tr>), stream, p, a, b, out);
}

// The kernel for few rows. Splits K among `k_splits` CTAs, at most 8.
template <typename Tr>
cudaError_t launch_few_rows(const Fp8MatmulParams& p, int k_splits, cudaStream_t stream) {
  static_assert(shared_memory_fits(Tr::kCtasPerSm, sizeof(Ring<Tr>)));
  CUtensorMap a, b;
  DSA_RETURN_IF_CUDA_ERROR(encode_maps<Tr>(p, &a, &b));
  const Tiles<Tr> tiles(p);
  if (k_splits == 1) {
    return launch_blocks(few_kernel<Tr>, tiles.all, Tr::kThreads, sizeof(Ring<Tr>), stream, p, a,
                         b);
  }
  return launch_clusters(few_kernel<Tr>, tiles.all, k_splits, Tr::kThreads, sizeof(Ring<Tr>),
                         stream, p, a, b);
}

}  // namespace jax_dsa::fp8
