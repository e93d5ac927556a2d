// Launchers of the sparse attention backward kernels.

#include "sparse_attention/bwd_dkv.cuh"
#include "sparse_attention/bwd_dq.cuh"
#include "sparse_attention/bwd_rows.cuh"
#include "sparse_attention/launch.h"
#include "sparse_attention/sparse_attention.h"

namespace jax_dsa {
namespace {

using namespace sparse_attention;

// The arrays in the workspace.
struct BwdWorkspace {
  float* delta;  // [batch, queries, heads]
  TileLists unions;
  InverseLists inverse;
  unsigned* dq_tile_counter;
  int64_t bytes;

  BwdWorkspace(const SparseAttentionBwdParams& p, int tile_queries)
      : delta(static_cast<float*>(p.workspace)),
        unions(tile_lists(p, tile_queries, static_cast<char*>(p.workspace) + delta_bytes(p))),
        inverse(
            p, unions.tiles,
            static_cast<char*>(p.workspace) + delta_bytes(p) + tile_lists_bytes(p, tile_queries)) {
    const int64_t lists_end = delta_bytes(p) + tile_lists_bytes(p, tile_queries) + inverse.bytes;
    dq_tile_counter = reinterpret_cast<unsigned*>(static_cast<char*>(p.workspace) + lists_end);
    bytes = lists_end + 16;
  }

  static int64_t delta_bytes(const SparseAttentionBwdParams& p) {
    return ceil_div(p.batch * p.queries * p.heads, int64_t{4}) * 16;
  }
};

template <DType kType>
cudaError_t launch_delta(const SparseAttentionBwdParams& p, float* delta, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.batch * p.queries * p.heads, int64_t{kDeltaRows});
  return launch_blocks(delta_kernel<kType>, blocks, kDeltaThreads, 0, stream, p, delta);
}

// Returns the number of ranges of queries of which the L2 cache holds q and dout of a KV head,
// beside other data.
int num_ranges(const SparseAttentionBwdParams& p, int64_t l2_bytes, int chunks) {
  const int64_t bytes = p.queries * (p.heads / p.groups) * (p.dim + p.value_dim) * 2;
  const int64_t most = std::min(kMaxRanges, chunks);
  return static_cast<int>(std::clamp(ceil_div(bytes, l2_bytes / 3 + 1), int64_t{1}, most));
}

// Launches the kernels that build the inverse lists. A step of the main kernel has `step_entries`
// entries.
cudaError_t build_inverse_lists(const SparseAttentionBwdParams& p, const TileLists& unions,
                                const InverseLists& inverse, int step_entries,
                                cudaStream_t stream) {
  const int64_t blocks = p.batch * p.groups * inverse.chunks;
  if (blocks > INT32_MAX || inverse.tiles > (INT32_MAX - kParts) / kMaxRanges)
    return cudaErrorInvalidValue;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  DSA_RETURN_IF_CUDA_ERROR(clear(inverse.cursors, inverse.tiles * inverse.chunks * 4, stream));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(inverse_kernel<false>, blocks, kInverseThreads,
                                         kMaxTileQueries * 4, stream, p, unions, inverse));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(chunk_sums_kernel,
                                         ceil_div(inverse.tiles, int64_t{kInverseThreads}),
                                         kInverseThreads, 0, stream, inverse));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(plan_kernel, 1, kPlanThreads, kPlanThreads / 32 * 8,
                                         stream, inverse, step_entries,
                                         num_ranges(p, device.l2_bytes, inverse.chunks)));
  return launch_blocks(inverse_kernel<true>, blocks, kInverseThreads, kMaxTileQueries * 4, stream,
                       p, unions, inverse);
}

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

// Computes dK and dV from the unions and delta.
template <DType kType, int kD, int kE>
cudaError_t launch_dkv(const SparseAttentionBwdParams& p, const BwdWorkspace& w,
                       cudaStream_t stream) {
  using Tr = DkvTraits<kType, kD, kE>;
  const StepShape shape(p.heads / p.groups, Tr::kRows);
  DSA_RETURN_IF_CUDA_ERROR(build_inverse_lists(p, w.unions, w.inverse, shape.entries, stream));
  CUtensorMap k_map, v_map;
  DSA_RETURN_IF_CUDA_ERROR(encode_keys(&k_map, p, p.k, p.dim, kTile));
  DSA_RETURN_IF_CUDA_ERROR(encode_keys(&v_map, p, p.v, p.value_dim, kTile));
  return launch_persistent<DkvShared<Tr>>(dkv_kernel<Tr>, w.inverse.tiles + kParts, Tr::kThreads,
                                          stream, p, w.inverse, w.delta, shape, k_map, v_map);
}

}  // namespace

int64_t sparse_attention_bwd_workspace_bytes(const SparseAttentionBwdParams& p) {
  const int queries = p.heads > 0 && sizes_fit(p) ? tile_queries(p, kTileRows) : 0;
  return queries == 0 ? 0 : BwdWorkspace(p, queries).bytes;
}

cudaError_t launch_sparse_attention_bwd(const SparseAttentionBwdParams& p, cudaStream_t stream) {
  if (!sizes_fit(p) || !(p.scale > 0.f) || p.batch * p.queries * p.heads > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (p.heads == 0) {
    DSA_RETURN_IF_CUDA_ERROR(clear(p.dk, p.batch * p.keys * p.groups * p.dim * 4, stream));
    return clear(p.dv, p.batch * p.keys * p.groups * p.value_dim * 4, stream);
  }
  const int queries = tile_queries(p, kTileRows);
  if (queries == 0) return cudaErrorInvalidValue;
  const BwdWorkspace w(p, queries);
  if (p.batch * p.queries > 0) {
    DSA_RETURN_IF_CUDA_ERROR(make_unions(p, w.unions, stream));
  }
  return launch_dims(p, [&]<DType kType, int kD, int kE>() {
    if (p.batch * p.queries > 0) {
      DSA_RETURN_IF_CUDA_ERROR(launch_delta<kType>(p, w.delta, stream));
      DSA_RETURN_IF_CUDA_ERROR((launch_dq<kType, kD, kE>(p, w, stream)));
    }
    return w.inverse.tiles > 0 ? launch_dkv<kType, kD, kE>(p, w, stream) : cudaSuccess;
  });
}

}  // namespace jax_dsa
