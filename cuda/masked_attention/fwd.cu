// Launcher of the masked attention forward kernel.

#include "masked_attention/fwd.cuh"
#include "masked_attention/launch.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {
namespace {

using namespace masked_attention;

// The ticket has 16 bytes of its own; the bounds follow.
constexpr int64_t kTicketBytes = 16;

template <typename Tr>
cudaError_t launch(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  Device device;
  if (cudaError_t e = current_device(&device); e != cudaSuccess) return e;
  const Work work(p, device.l2_bytes);
  if (work.items > INT32_MAX - 4096) return cudaErrorInvalidValue;
  if (cudaError_t e = clear(p.workspace, kTicketBytes, stream); e != cudaSuccess) return e;
  auto* const queries =
      reinterpret_cast<QueryBounds*>(static_cast<char*>(p.workspace) + kTicketBytes);
  auto* const segments = reinterpret_cast<SegmentBounds*>(queries + bounded_query_tiles(p));
  Bounds bounds;
  if (cudaError_t e = find_bounds(p, queries, segments, &bounds, stream); e != cudaSuccess) {
    return e;
  }
  CUtensorMap q_map, k_map, v_map;
  if (cudaError_t e =
          encode_rows(&q_map, p.dtype, p.q, p.batch, p.queries, p.heads, p.dim, kQueryTile);
      e != cudaSuccess) {
    return e;
  }
  if (cudaError_t e =
          encode_rows(&k_map, p.dtype, p.k, p.batch, p.keys, p.groups, p.dim, Tr::kKeys);
      e != cudaSuccess) {
    return e;
  }
  if (cudaError_t e =
          encode_rows(&v_map, p.dtype, p.v, p.batch, p.keys, p.groups, p.value_dim, Tr::kKeys);
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

}  // namespace

int64_t masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams& p) {
  return kTicketBytes + bounded_query_tiles(p) * int64_t{sizeof(QueryBounds)} +
         bounded_key_tiles(p) * int64_t{sizeof(SegmentBounds)};
}

cudaError_t launch_masked_attention_fwd(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (!dims_fit(p)) return cudaErrorInvalidValue;
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
