// Helpers that the launchers of both passes of sparse attention share.
#pragma once

#include "masked_attention/launch.h"
#include "sparse_attention/bwd_inverse.cuh"
#include "sparse_attention/rows.cuh"

namespace jax_dsa::sparse_attention {

// Encodes a tensor map of x [batch, queries, heads, dim] whose boxes are 64 columns of the heads of
// a KV head, for `tile_queries` queries.
template <typename Params>
cudaError_t encode_heads(CUtensorMap* map, const Params& p, const void* x, int dim,
                         int tile_queries) {
  const int heads = p.heads / p.groups;
  return encode_tensor_map(map, masked_attention::map_type(p.dtype),
                           tensor_box<4>(2, x, {dim, heads, p.groups, p.batch * p.queries},
                                         {64, heads, 1, tile_queries}));
}

// Encodes a tensor map of x [batch, keys, groups, dim] whose boxes are 64 columns of `rows` keys.
template <typename Params>
cudaError_t encode_keys(CUtensorMap* map, const Params& p, const void* x, int dim, int rows) {
  return masked_attention::encode_rows(map, p.dtype, x, p.batch, p.keys, p.groups, dim, rows);
}

// Returns whether the kernels take these sizes.
template <typename Params>
bool sizes_fit(const Params& p) {
  const auto dim = [](int n) { return n > 0 && n <= 256 && n % 8 == 0; };
  constexpr int64_t kMaxLength = INT32_MAX - 4096;
  const SparseAttentionLists& x = p.lists;
  const int b = x.block_size;
  const bool block_size = b == 1 || b == 4 || b == 16 || b == 32 || b == 64 || b == 128;
  return block_size && x.slots >= 0 && x.sink_blocks >= 0 && x.local_blocks >= 0 && p.groups > 0 &&
         p.heads % p.groups == 0 && p.heads / p.groups <= 32 && dim(p.dim) && dim(p.value_dim) &&
         p.batch * p.queries <= kMaxLength && p.keys <= kMaxLength;
}

// Calls launch<dtype, D, E>() with the smallest dims of the kernels that cover the call.
template <typename Params, typename Launch>
cudaError_t launch_dims(const Params& p, Launch launch) {
  const auto with_type = [&]<DType kType>() {
    const int dim = p.dim, value_dim = p.value_dim;
    if (dim <= 64 && value_dim <= 64) return launch.template operator()<kType, 64, 64>();
    if (dim <= 128 && value_dim <= 128) return launch.template operator()<kType, 128, 128>();
    if (dim <= 192 && value_dim <= 128) return launch.template operator()<kType, 192, 128>();
    return launch.template operator()<kType, 256, 256>();
  };
  switch (p.dtype) {
    case DType::kBF16:
      return with_type.template operator()<DType::kBF16>();
    case DType::kF16:
      return with_type.template operator()<DType::kF16>();
    default:
      return cudaErrorInvalidValue;
  }
}

// The forward pass: makes the unions of tiles of kTileRows rows, then calls
// launch<dtype, D, E>(call, unions). The tile counter occupies the first 16 bytes of the workspace.
inline constexpr int64_t kTileCounterBytes = 16;

template <typename Launch>
cudaError_t launch_fwd(const SparseAttentionFwdParams& params, cudaStream_t stream, Launch launch) {
  TileCall<SparseAttentionFwdParams> p = {params, 0};
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (!sizes_fit(p) || !(p.scale > 0.f)) return cudaErrorInvalidValue;
  p.tile_queries = tile_queries(p, kTileRows);
  if (p.tile_queries == 0) return cudaErrorInvalidValue;
  const TileLists lists =
      tile_lists(p, p.tile_queries, static_cast<char*>(p.workspace) + kTileCounterBytes);
  DSA_RETURN_IF_CUDA_ERROR(make_unions(ListCall(p), lists, stream));
  return launch_dims(p, [&]<DType kType, int kD, int kE>() {
    return launch.template operator()<kType, kD, kE>(p, lists);
  });
}

// The backward pass: makes the unions and delta, then calls launch<dtype, D, E>(workspace).
// `tile_keys` are the keys of a tile of the inverse lists.
template <typename Launch>
cudaError_t launch_bwd(const SparseAttentionBwdParams& p, int tile_keys, cudaStream_t stream,
                       Launch launch) {
  if (!sizes_fit(p) || !(p.scale > 0.f) || p.batch * p.queries * p.heads > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (p.heads == 0) {
    DSA_RETURN_IF_CUDA_ERROR(clear(p.dk, p.batch * p.keys * p.groups * p.dim * 4, stream));
    return clear(p.dv, p.batch * p.keys * p.groups * p.value_dim * 4, stream);
  }
  const int queries = tile_queries(p, kTileRows);
  if (queries == 0) return cudaErrorInvalidValue;
  const BwdWorkspace w(p, queries, tile_keys);
  if (p.batch * p.queries > 0) {
    DSA_RETURN_IF_CUDA_ERROR(make_unions(ListCall(p), w.unions, stream));
    DSA_RETURN_IF_CUDA_ERROR(compute_delta(p, w.delta, stream));
  }
  return launch_dims(p, [&]<DType kType, int kD, int kE>() {
    return launch.template operator()<kType, kD, kE>(w);
  });
}

}  // namespace jax_dsa::sparse_attention
