// What the launchers of masked attention share.
#pragma once

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "masked_attention/mask.cuh"

namespace jax_dsa::masked_attention {

// Finds the bounds, in arrays of so many tiles.
template <typename Params>
cudaError_t find_bounds(const Params& p, QueryBounds* query_bounds, SegmentBounds* segment_bounds,
                        Bounds* bounds, cudaStream_t stream) {
  const int64_t queries = bounded_query_tiles(p), keys = bounded_key_tiles(p);
  bounds->queries = queries > 0 ? query_bounds : nullptr;
  bounds->segments = keys > 0 ? segment_bounds : nullptr;
  if (queries + keys == 0) return cudaSuccess;
  if (queries + keys > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(bounds_kernel, queries + keys, kBoundsThreads, sizeof(BoundsShared), stream,
                       p.mask, p.batch, p.queries, p.keys, query_bounds, segment_bounds);
}

// Boxes of `rows` rows and 64 columns of one head of x [batch, length, heads, dim]. There is no map
// of an empty array, and no copy of it.
inline cudaError_t encode_rows(CUtensorMap* map, DType dtype, const void* x, int64_t batch,
                               int64_t length, int heads, int dim, int rows) {
  *map = {};
  if (batch == 0 || length == 0 || heads == 0) return cudaSuccess;
  return encode_tensor_map(
      map,
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      tensor_box<4>(2, x, {dim, heads, length, batch}, {64, 1, rows, 1}));
}

template <typename Params>
bool dims_fit(const Params& p) {
  const auto dim = [](int n) { return n > 0 && n <= 256 && n % 8 == 0; };
  constexpr int64_t kMost = INT32_MAX - 4096;
  const AttentionMask& m = p.mask;
  const bool map = !m.map_rows || (m.block_q > 0 && m.block_k > 0 && m.block_k % kKeyTile == 0 &&
                                   m.map_heads > 0 && p.heads % m.map_heads == 0);
  return p.groups > 0 && p.heads % p.groups == 0 && dim(p.dim) && dim(p.value_dim) &&
         p.queries <= kMost && p.keys <= kMost && p.batch <= kMost && map;
}

// Calls launch<dtype, general>(), where scores are general if they are softcapped or their scale is
// not positive.
template <typename Params, typename Launch>
cudaError_t launch_kind(const Params& p, Launch launch) {
  const bool general = p.softcap > 0.f || !(p.scale > 0.f);
  switch (p.dtype) {
    case DType::kBF16:
      return general ? launch.template operator()<DType::kBF16, true>()
                     : launch.template operator()<DType::kBF16, false>();
    case DType::kF16:
      return general ? launch.template operator()<DType::kF16, true>()
                     : launch.template operator()<DType::kF16, false>();
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jax_dsa::masked_attention
