// Helpers that the launchers of both passes of masked attention share.
#pragma once

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "masked_attention/bias.cuh"
#include "masked_attention/mask.cuh"

namespace jax_dsa::masked_attention {

// Launches the kernel that computes the bounds of all tiles of kQueries queries and of all key
// tiles, and sets `bounds` to the arrays that it fills. An array that the mask does not need stays
// null.
template <int kQueries, typename Params>
cudaError_t find_bounds(const Params& p, QueryBounds* query_bounds, SegmentBounds* segment_bounds,
                        Bounds* bounds, cudaStream_t stream) {
  const int64_t queries = bounded_query_tiles<kQueries>(p), keys = bounded_key_tiles(p);
  bounds->queries = queries > 0 ? query_bounds : nullptr;
  bounds->segments = keys > 0 ? segment_bounds : nullptr;
  if (queries + keys == 0) return cudaSuccess;
  if (queries + keys > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(bounds_kernel<kQueries>, queries + keys, kQueries,
                       sizeof(BoundsShared<kQueries>), stream, p.mask, p.batch, p.queries, p.keys,
                       query_bounds, segment_bounds);
}

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Encodes a tensor map of x [batch, length, heads, dim] whose boxes are `rows` rows by 64 columns
// of one head. An empty array gets no map; nothing is loaded from it.
inline cudaError_t encode_rows(CUtensorMap* map, DType dtype, const void* x, int64_t batch,
                               int64_t length, int heads, int dim, int rows) {
  *map = {};
  if (batch == 0 || length == 0 || heads == 0) return cudaSuccess;
  return encode_tensor_map(map, map_type(dtype),
                           tensor_box<4>(2, x, {dim, heads, length, batch}, {64, 1, rows, 1}));
}

// Encodes a tensor map of x, which has the layout of the bias. Its boxes are 64 keys by `queries`
// queries, or by the one row that all queries share.
template <typename Params>
cudaError_t encode_bias(CUtensorMap* map, const Params& p, const void* x, int queries) {
  *map = {};
  const AttentionBias& b = p.bias;
  if (b.x == nullptr || b.batch == 0 || b.heads == 0 || b.queries == 0 || p.keys == 0) {
    return cudaSuccess;
  }
  return encode_tensor_map(map, map_type(p.dtype),
                           tensor_box<4>(2, x, {bias_row(p.keys), b.queries, b.heads, b.batch},
                                         {64, b.queries == 1 ? 1 : queries, 1, 1}));
}

template <typename Params>
bool dims_fit(const Params& p) {
  const auto dim = [](int n) { return n > 0 && n <= 256 && n % 8 == 0; };
  constexpr int64_t kMaxLength = INT32_MAX - 4096;
  const AttentionMask& m = p.mask;
  // The kernels decide by comparing with `groups` whether the heads of a group share a map.
  const auto allowed = [&](int heads) {
    return heads == 1 || heads == p.groups || heads == p.heads;
  };
  const bool map = !m.map_rows || (m.block_q > 0 && m.block_k > 0 && m.block_k % kKeyTile == 0 &&
                                   allowed(m.map_heads));
  const AttentionBias& b = p.bias;
  const bool bias = !b.x || ((b.queries == 1 || b.queries == p.queries) && allowed(b.heads) &&
                             (b.batch == 1 || b.batch == p.batch));
  return p.groups > 0 && p.heads % p.groups == 0 && dim(p.dim) && dim(p.value_dim) &&
         p.queries <= kMaxLength && p.keys <= kMaxLength && p.batch <= kMaxLength && map && bias;
}

// Calls launch<dtype, general, bias>(). Scores are "general" if they have a bias or a softcap, or
// if their scale is not positive.
template <typename Params, typename Launch>
cudaError_t launch_kind(const Params& p, Launch launch) {
  const auto with_type = [&]<DType kType>() {
    if (p.bias.x) return launch.template operator()<kType, true, true>();
    if (p.softcap > 0.f || !(p.scale > 0.f)) {
      return launch.template operator()<kType, true, false>();
    }
    return launch.template operator()<kType, false, false>();
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

}  // namespace jax_dsa::masked_attention
