// Launcher of the masked attention forward kernel.

#include "masked_attention/fwd_launch.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {
namespace {

using namespace masked_attention;

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
  return launch_kind(
      p, [&]<DType kType, bool kGeneral>() { return launch_dims<kType, kGeneral>(p, stream); });
}

}  // namespace jax_dsa
