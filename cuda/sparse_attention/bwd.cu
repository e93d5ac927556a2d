// Launchers of the sparse attention backward kernels.

#include "common/error.h"
#include "common/launch.cuh"
#include "masked_attention/launch.h"
#include "sparse_attention/bwd_dkv.cuh"
#include "sparse_attention/bwd_rows.cuh"

namespace jax_dsa {
namespace {

using namespace sparse_attention;

// Launches the kernels that build the inverse lists. A step of the main kernel has `step_entries`
// entries.
cudaError_t build_inverse_lists(const SparseAttentionBwdParams& p, const TileLists& unions,
                                       const InverseLists& inverse, int step_entries,
                                       cudaStream_t stream) {
  const int64_t blocks = p.batch * p.groups * inverse.chunks;
  if (blocks > INT32_MAX || inverse.tiles > INT32_MAX - kParts) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(clear(inverse.cursors, inverse.tiles * inverse.chunks * 4, stream));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(inverse_kernel<false>, blocks, kInverseThreads,
                                         kMaxTileQueries * 4, stream, p, unions, inverse));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(chunk_sums_kernel,
                                         ceil_div(inverse.tiles, int64_t{kInverseThreads}),
                                         kInverseThreads, 0, stream, inverse));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(plan_kernel, 1, kPlanThreads, kPlanThreads / 32 * 8,
                                         stream, inverse, step_entries));
  return launch_blocks(inverse_kernel<true>, blocks, kInverseThreads, kMaxTileQueries * 4, stream,
                       p, unions, inverse);
}

template <typename Tr>
cudaError_t launch_dkv_kernel(const SparseAttentionBwdParams& p, const InverseLists& inverse,
                              const float* delta, const StepShape& shape, cudaStream_t stream) {
  CUtensorMap k_map, v_map;
  DSA_RETURN_IF_CUDA_ERROR(masked_attention::encode_rows(&k_map, p.dtype, p.k, p.batch, p.keys,
                                                         p.groups, p.dim, kTile));
  DSA_RETURN_IF_CUDA_ERROR(masked_attention::encode_rows(&v_map, p.dtype, p.v, p.batch, p.keys,
                                                         p.groups, p.value_dim, kTile));
  return launch_persistent<DkvShared<Tr>>(dkv_kernel<Tr>, inverse.tiles + kParts, Tr::kThreads,
                                          stream, p, inverse, delta, shape, k_map, v_map);
}

template <DType kType>
cudaError_t launch_dkv_dims(const SparseAttentionBwdParams& p, const InverseLists& inverse,
                            const float* delta, const StepShape& shape, cudaStream_t stream) {
  if (p.dim > 192 || p.value_dim > 128) {
    return launch_dkv_kernel<DkvTraits<kType, 256, 256>>(p, inverse, delta, shape, stream);
  }
  if (p.dim > 128) {
    return launch_dkv_kernel<DkvTraits<kType, 192, 128>>(p, inverse, delta, shape, stream);
  }
  if (p.dim > 64 || p.value_dim > 64) {
    return launch_dkv_kernel<DkvTraits<kType, 128, 128>>(p, inverse, delta, shape, stream);
  }
  return launch_dkv_kernel<DkvTraits<kType, 64, 64>>(p, inverse, delta, shape, stream);
}

// Computes dK and dV. `delta` is [batch, queries, heads], see bwd_rows.cuh. The workspace holds
// InverseLists(p, workspace).bytes bytes.
cudaError_t launch_dkv(const SparseAttentionBwdParams& p, const TileLists& unions,
                              const float* delta, void* workspace, cudaStream_t stream) {
  const InverseLists inverse(p, workspace);
  const StepShape shape(p.heads / p.groups);
  if (!shape.covers(p.heads / p.groups)) return cudaErrorInvalidValue;
  if (inverse.tiles == 0) return cudaSuccess;
  const int step_entries = shape.entries;
  DSA_RETURN_IF_CUDA_ERROR(build_inverse_lists(p, unions, inverse, step_entries, stream));
  switch (p.dtype) {
    case DType::kBF16:
      return launch_dkv_dims<DType::kBF16>(p, inverse, delta, shape, stream);
    case DType::kF16:
      return launch_dkv_dims<DType::kF16>(p, inverse, delta, shape, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace jax_dsa
