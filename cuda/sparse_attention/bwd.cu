// Launchers of the sparse attention backward kernels for Hopper.

#include "sparse_attention/bwd_dkv.cuh"
#include "sparse_attention/bwd_dq.cuh"
#include "sparse_attention/bwd_rows.cuh"
#include "sparse_attention/launch.h"
#include "sparse_attention/sparse_attention.h"

namespace jax_dsa {
namespace {

using namespace sparse_attention;

// Computes dQ from the unions and delta.
template <DType kType, int kD, int kE>
cudaError_t launch_dq(const SparseAttentionBwdParams& params, const BwdWorkspace& w,
                      cudaStream_t stream) {
  using Tr = DqTraits<kType, kD, kE>;
  const DqCall p = {params, w.unions.tile_queries};
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const masked_attention::TileScheduler scheduler(p, p.groups, p.tile_queries, device.l2_bytes);
  if (scheduler.work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(clear(w.dq_tile_counter, 16, stream));
  const int box = std::min(p.lists.block_size, Tr::kKeys);
  CUtensorMap q_map, dout_map, k_map, v_map;
  DSA_RETURN_IF_CUDA_ERROR(encode_heads(&q_map, p, p.q, p.dim, p.tile_queries));
  DSA_RETURN_IF_CUDA_ERROR(encode_heads(&dout_map, p, p.dout, p.value_dim, p.tile_queries));
  DSA_RETURN_IF_CUDA_ERROR(encode_keys(&k_map, p, p.k, p.dim, box));
  DSA_RETURN_IF_CUDA_ERROR(encode_keys(&v_map, p, p.v, p.value_dim, box));
  return launch_persistent<masked_attention::Shared<Tr>>(
      dq_kernel<Tr>, scheduler.work_tiles, Tr::kThreads, stream, p, scheduler, w.unions, w.delta,
      w.dq_tile_counter, q_map, dout_map, k_map, v_map);
}

// Returns how many keys the tiles of dK and dV have. Tiles of 128 keys read the rows of q and dout
// half as often, but all their keys must be in one block, and there must be enough tiles to divide
// the work evenly among SMs. Only calls with 65 to 128 dims have them.
int tile_keys(const SparseAttentionBwdParams& p, int num_sms) {
  const int dim = std::max(p.dim, p.value_dim);
  const int64_t tiles = p.batch * p.groups * ceil_div(p.keys, int64_t{128});
  const bool one_block = p.lists.block_size == 128 && !p.lists.starts;
  return one_block && dim > 64 && dim <= 128 && tiles >= int64_t{4} * num_sms ? 128 : kTile;
}

// Computes dK and dV from the unions and delta.
template <DType kType, int kD, int kE, int kKeys>
cudaError_t launch_dkv(const SparseAttentionBwdParams& p, const BwdWorkspace& w,
                       cudaStream_t stream) {
  using Tr = DkvTraits<kType, kD, kE, kKeys>;
  const StepShape shape(p.heads / p.groups, Tr::kRows);
  DSA_RETURN_IF_CUDA_ERROR(build_inverse_lists(p, w, shape.entries, stream));
  CUtensorMap k_map, v_map;
  DSA_RETURN_IF_CUDA_ERROR(encode_keys(&k_map, p, p.k, p.dim, kKeys));
  DSA_RETURN_IF_CUDA_ERROR(encode_keys(&v_map, p, p.v, p.value_dim, kKeys));
  return launch_persistent<DkvShared<Tr>>(dkv_kernel<Tr>, w.inverse.tiles + kParts, Tr::kThreads,
                                          stream, p, w.inverse, w.delta, shape, k_map, v_map);
}

}  // namespace

cudaError_t hopper::launch_sparse_attention_bwd(const SparseAttentionBwdParams& p,
                                                cudaStream_t stream) {
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const int keys = tile_keys(p, device.num_sms);
  return launch_bwd(p, keys, stream, [&]<DType kType, int kD, int kE>(const BwdWorkspace& w) {
    if (p.batch * p.queries > 0) {
      DSA_RETURN_IF_CUDA_ERROR((launch_dq<kType, kD, kE>(p, w, stream)));
    }
    if (w.inverse.tiles == 0) return cudaSuccess;
    if constexpr (kD == 128) {
      if (keys > kTile) return launch_dkv<kType, kD, kE, 128>(p, w, stream);
    }
    return launch_dkv<kType, kD, kE, kTile>(p, w, stream);
  });
}

}  // namespace jax_dsa
