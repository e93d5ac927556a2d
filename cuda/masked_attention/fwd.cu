// Launcher of the masked attention forward kernel.

#include "masked_attention/fwd_launch.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {
namespace {

using namespace masked_attention;

template <DType kType, bool kGeneral, bool kBias>
cudaError_t launch_dims(const MaskedAttentionFwdParams& p, cudaStream_t stream) {
  const int dim = p.dim, value_dim = p.value_dim;
  const auto launch_traits = [&]<int kD, int kE>() {
    return launch<FwdTraits<kType, kD, kE, kGeneral, kBias>>(p, stream);
  };
  if (dim <= 64 && value_dim <= 64) return launch_traits.template operator()<64, 64>();
  if constexpr (!kBias) {
    if (dim <= 96 && value_dim <= 96) return launch_traits.template operator()<96, 96>();
  }
  if (dim <= 128 && value_dim <= 128) return launch_traits.template operator()<128, 128>();
  if constexpr (!kBias) {
    if (dim <= 192 && value_dim <= 128) return launch_traits.template operator()<192, 128>();
  }
  return launch_traits.template operator()<256, 256>();
}

}  // namespace

int64_t hopper::masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams& p) {
  return kTileCounterBytes + bounded_query_tiles(p) * int64_t{sizeof(QueryBounds)} +
         bounded_key_tiles(p) * int64_t{sizeof(SegmentBounds)};
}

cudaError_t hopper::launch_masked_attention_fwd(const MaskedAttentionFwdParams& p,
                                                cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (!dims_fit(p)) return cudaErrorInvalidValue;
  return launch_kind(p, [&]<DType kType, bool kGeneral, bool kBias>() {
    return launch_dims<kType, kGeneral, kBias>(p, stream);
  });
}

}  // namespace jax_dsa
