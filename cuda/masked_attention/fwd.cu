// Launcher of the masked attention forward kernel.

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "masked_attention/fwd.cuh"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {
namespace {

using namespace masked_attention;

// The ticket has 16 bytes of its own; the bounds follow.
constexpr int64_t kTicketBytes = 16;

int64_t query_tiles(const MaskedAttentionFwdParams& p) {
  return has_query_bounds(p.mask) ? p.batch * ceil_div(p.queries, int64_t{kQueryTile}) : 0;
}
int64_t key_tiles(const MaskedAttentionFwdParams& p) {
  return p.mask.kv_segments ? p.batch * ceil_div(p.keys, int64_t{kKeyTile}) : 0;
}

// Finds the bounds of the masks in the workspace.
cudaError_t prepare(const MaskedAttentionFwdParams& p, Bounds* bounds, cudaStream_t stream) {
  if (cudaError_t e = clear(p.workspace, kTicketBytes, stream); e != cudaSuccess) return e;
  const int64_t queries = query_tiles(p), keys = key_tiles(p);
  if (queries + keys == 0) return cudaSuccess;
  if (queries + keys > INT32_MAX) return cudaErrorInvalidValue;
  auto* const query_bounds =
      reinterpret_cast<QueryBounds*>(static_cast<char*>(p.workspace) + kTicketBytes);
  auto* const segment_bounds = reinterpret_cast<SegmentBounds*>(query_bounds + queries);
  bounds->queries = queries > 0 ? query_bounds : nullptr;
  bounds->segments = keys > 0 ? segment_bounds : nullptr;
  return launch_blocks(prepare_kernel, queries + keys, kPrepareThreads, sizeof(PrepareShared),
                       stream, p.mask, p.batch, p.queries, p.keys, query_bounds, segment_bounds);
}

CUtensorMapDataType element_type(DType dtype) {
  return dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Boxes of `rows` rows and 64 columns of one head of x [batch, length, heads, dim].
cudaError_t encode_rows(CUtensorMap* map, const MaskedAttentionFwdParams& p, const void* x,
                        int64_t length, int heads, int dim, int rows) {
  return encode_tensor_map(map, element_type(p.dtype),
                           tensor_box<4>(2, x, {dim, heads, length, p.batch}, {64, 1, rows, 1}));
}

template <typename Tr>
cudaError_t launch(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  Device device;
  if (cudaError_t e = current_device(&device); e != cudaSuccess) return e;
  const Work work(p, device.l2_bytes);
  if (work.items > INT32_MAX - 4096) return cudaErrorInvalidValue;
  Bounds bounds = {};
  if (cudaError_t e = prepare(p, &bounds, stream); e != cudaSuccess) return e;
  CUtensorMap q_map, k_map, v_map;
  if (cudaError_t e = encode_rows(&q_map, p, p.q, p.queries, p.heads, p.dim, kQueryTile);
      e != cudaSuccess) {
    return e;
  }
  if (cudaError_t e = encode_rows(&k_map, p, p.k, p.keys, p.groups, p.dim, Tr::kKeys);
      e != cudaSuccess) {
    return e;
  }
  if (cudaError_t e = encode_rows(&v_map, p, p.v, p.keys, p.groups, p.value_dim, Tr::kKeys);
      e != cudaSuccess) {
    return e;
  }
  return launch_persistent<Shared<Tr>>(fwd_kernel<Tr>, work.items, kThreads, stream, p, work,
                                       bounds, q_map, k_map, v_map);
}

template <DType kType, bool kGeneral>
cudaError_t launch_dims(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  const int dim = p.dim, value_dim = p.value_dim;
  if (dim <= 64 && value_dim <= 64) return launch<FwdTraits<kType, 64, 64, kGeneral>>(p, stream);
  if (dim <= 96 && value_dim <= 96) return launch<FwdTraits<kType, 96, 96, kGeneral>>(p, stream);
  if (dim <= 128 && value_dim <= 128) {
    return launch<FwdTraits<kType, 128, 128, kGeneral>>(p, stream);
  }
  if (dim <= 192 && value_dim <= 128) {
    return launch<FwdTraits<kType, 192, 128, kGeneral>>(p, stream);
  }
  return launch<FwdTraits<kType, 256, 256, kGeneral>>(p, stream);
}

bool fits(const MaskedAttentionFwdParams& p) {
  const auto dim = [](int n) { return n > 0 && n <= 256 && n % 8 == 0; };
  constexpr int64_t kMost = INT32_MAX - 4096;
  const AttentionMask& m = p.mask;
  const bool map = !m.map_rows || (m.block_q > 0 && m.block_k > 0 && m.block_k % kKeyTile == 0 &&
                                   m.map_heads > 0 && p.heads % m.map_heads == 0);
  return p.groups > 0 && p.heads % p.groups == 0 && dim(p.dim) && dim(p.value_dim) &&
         p.queries <= kMost && p.keys <= kMost && p.batch <= kMost && map;
}

}  // namespace

int64_t masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams& p) {
  return kTicketBytes + query_tiles(p) * int64_t{sizeof(QueryBounds)} +
         key_tiles(p) * int64_t{sizeof(SegmentBounds)};
}

cudaError_t launch_masked_attention_fwd(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (!fits(p)) return cudaErrorInvalidValue;
  const bool general = p.softcap > 0.f || !(p.scale > 0.f);
  if (p.dtype == DType::kBF16) {
    return general ? launch_dims<DType::kBF16, true>(p, stream)
                   : launch_dims<DType::kBF16, false>(p, stream);
  }
  if (p.dtype == DType::kF16) {
    return general ? launch_dims<DType::kF16, true>(p, stream)
                   : launch_dims<DType::kF16, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa
