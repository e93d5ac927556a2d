// Launcher of the sparse attention forward kernel for Hopper.

#include "sparse_attention/fwd.cuh"
#include "sparse_attention/launch.h"
#include "sparse_attention/sparse_attention.h"

namespace jax_dsa {
namespace {

using namespace sparse_attention;

template <typename Tr>
cudaError_t launch(const FwdCall& p, const TileLists& lists, cudaStream_t stream) {
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const masked_attention::TileScheduler scheduler(p, p.groups, p.tile_queries, device.l2_bytes);
  if (scheduler.work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.workspace, kTileCounterBytes, stream));
  const int box = std::min(p.lists.block_size, Tr::kKeys);
  CUtensorMap q_map, k_map, v_map;
  DSA_RETURN_IF_CUDA_ERROR(encode_heads(&q_map, p, p.q, p.dim, p.tile_queries));
  DSA_RETURN_IF_CUDA_ERROR(encode_keys(&k_map, p, p.k, p.dim, box));
  DSA_RETURN_IF_CUDA_ERROR(encode_keys(&v_map, p, p.v, p.value_dim, box));
  return launch_persistent<masked_attention::Shared<Tr>>(
      fwd_kernel<Tr>, scheduler.work_tiles, Tr::kThreads, stream, p, scheduler, lists,
      static_cast<unsigned*>(p.workspace), q_map, k_map, v_map);
}

}  // namespace

cudaError_t hopper::launch_sparse_attention_fwd(const SparseAttentionFwdParams& params,
                                                cudaStream_t stream) {
  return launch_fwd(params, stream,
                    [&]<DType kType, int kD, int kE>(const FwdCall& p, const TileLists& lists) {
                      return launch<FwdTraits<kType, kD, kE>>(p, lists, stream);
                    });
}

}  // namespace jax_dsa
