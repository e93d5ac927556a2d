// Launcher of the portable masked attention forward kernel.

#include "masked_attention/masked_attention.h"
#include "masked_attention/portable_fwd_launch.h"

namespace jax_dsa::portable {
namespace {

using namespace masked_attention;

// Launches tiles of kKeys keys if two CTAs with them fit in an SM, else tiles of kFewKeys keys.
template <DType kType, bool kGeneral, int kD, int kE, int kRowTiles, int kKeys, int kFewKeys>
cudaError_t launch_tiles(const MaskedAttentionFwdParams& p, const Device& device,
                         cudaStream_t stream) {
  using Tr = PortableFwdTraits<kType, kD, kE, kGeneral, kRowTiles, kKeys, 2>;
  using Few = PortableFwdTraits<kType, kD, kE, kGeneral, kRowTiles, kFewKeys, 2>;
  static_assert(sizeof(PortableFwdShared<Few>) <= kMinSharedBytes);
  const int64_t needed = 2 * (sizeof(PortableFwdShared<Tr>) + kReservedSharedBytes);
  return needed <= device.shared_bytes + kReservedSharedBytes
             ? launch_portable<Tr>(p, device, stream)
             : launch_portable<Few>(p, device, stream);
}

// The tile sizes by head dim: dim, value dim, row tiles per warp, keys and few keys.
template <DType kType, bool kGeneral>
cudaError_t launch_dims(const MaskedAttentionFwdParams& p, const Device& device,
                        cudaStream_t stream) {
  const int dim = p.dim, value_dim = p.value_dim;
  if (dim <= 64 && value_dim <= 64) {
    return launch_tiles<kType, kGeneral, 64, 64, 2, kGeneral ? 64 : 128, kGeneral ? 32 : 64>(
        p, device, stream);
  }
  if constexpr (!kGeneral) {
    if (dim <= 96 && value_dim <= 96) {
      return launch_tiles<kType, kGeneral, 96, 96, 2, 64, 32>(p, device, stream);
    }
  }
  if (dim <= 128 && value_dim <= 128) {
    return launch_tiles<kType, kGeneral, 128, 128, 2, 64, 32>(p, device, stream);
  }
  if constexpr (!kGeneral) {
    if (dim <= 192 && value_dim <= 128) {
      return launch_tiles<kType, kGeneral, 192, 128, 2, 64, 32>(p, device, stream);
    }
  }
  return launch_tiles<kType, kGeneral, 256, 256, 1, 64, 32>(p, device, stream);
}

}  // namespace

int64_t masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams& p) {
  return bounded_query_tiles(p) * int64_t{sizeof(QueryBounds)} +
         bounded_key_tiles(p) * int64_t{sizeof(SegmentBounds)};
}

cudaError_t launch_masked_attention_fwd(const MaskedAttentionFwdParams& p, const Device& device,
                                        cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (!dims_fit(p)) return cudaErrorInvalidValue;
  return launch_kind(p, [&]<DType kType, bool kGeneral, bool>() {
    return launch_dims<kType, kGeneral>(p, device, stream);
  });
}

}  // namespace jax_dsa::portable
