// Launchers of the sparse attention backward kernels.

#include "sparse_attention/bwd_dkv.cuh"
#include "sparse_attention/bwd_rows.cuh"
#include "sparse_attention/launch.h"
#include "sparse_attention/sparse_attention.h"

namespace jax_dsa {
namespace {

using namespace sparse_attention;

inline constexpr int kBwdTileRows = 128;  // MMA rows of a tile of TileLists

// The arrays in the workspace.
struct BwdWorkspace {
  float* delta;  // [batch, queries, heads]
  TileLists unions;
  InverseLists inverse;
  int64_t bytes;

  BwdWorkspace(const SparseAttentionBwdParams& p, int tile_queries)
      : delta(static_cast<float*>(p.workspace)),
        unions(tile_lists(p, tile_queries, static_cast<char*>(p.workspace) + delta_bytes(p))),
        inverse(
            p, unions.tiles,
            static_cast<char*>(p.workspace) + delta_bytes(p) + tile_lists_bytes(p, tile_queries)),
        bytes(delta_bytes(p) + tile_lists_bytes(p, tile_queries) + inverse.bytes) {}

  static int64_t delta_bytes(const SparseAttentionBwdParams& p) {
    return ceil_div(p.batch * p.queries * p.heads, int64_t{4}) * 16;
  }
};

template <DType kType>
cudaError_t launch_delta(const SparseAttentionBwdParams& p, float* delta, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.batch * p.queries * p.heads, int64_t{kDeltaRows});
  return launch_blocks(delta_kernel<kType>, blocks, kDeltaThreads, 0, stream, p, delta);
}

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
  const int queries = tile_queries(p, kBwdTileRows);
  return queries == 0 ? 0 : BwdWorkspace(p, queries).bytes;
}

cudaError_t launch_sparse_attention_bwd(const SparseAttentionBwdParams& p, cudaStream_t stream) {
  if (!sizes_fit(p) || p.batch * p.queries * p.heads > INT32_MAX) return cudaErrorInvalidValue;
  const int queries = tile_queries(p, kBwdTileRows);
  if (queries == 0) return cudaErrorInvalidValue;
  const BwdWorkspace w(p, queries);
  if (p.batch * p.queries > 0) {
    DSA_RETURN_IF_CUDA_ERROR(make_unions(p, w.unions, stream));
  }
  return launch_dims(p, [&]<DType kType, int kD, int kE>() {
    if (p.batch * p.queries > 0) {
      DSA_RETURN_IF_CUDA_ERROR(launch_delta<kType>(p, w.delta, stream));
      // The kernel of dQ, which walks over the unions, goes here.
    }
    return w.inverse.tiles > 0 ? launch_dkv<kType, kD, kE>(p, w, stream) : cudaSuccess;
  });
}

}  // namespace jax_dsa
