// Launcher of the portable mqa_decode kernel, and its instances for values that are the first
// elements of the keys.

#include "mqa_decode/portable_launch.cuh"

namespace jax_dsa::portable {
namespace {

using namespace mqa_decode;

// The tile sizes by the number of rows: rows per group, groups, keys, keys per warp, slots and CTAs
// per SM. Records leave no room for the scores of four parts of the columns.
template <int kD, bool kRecords = false>
cudaError_t launch_latent(const TunedParams& p, const Device& device, cudaStream_t stream) {
  using Least = mla::PortableTraits<kD, 32, 1, 16, 16, 2, 2>;
  const int64_t rows = p.queries * (p.heads / p.groups);
  if (rows <= 16) {
    return launch_first<kRecords, mla::PortableTraits<kD, 16, 1, 32, 16, 2, 2>, Least>(p, device,
                                                                                       stream);
  }
  if (rows <= 32) return launch_first<kRecords, Least>(p, device, stream);
  return launch_first<kRecords, mla::PortableTraits<kD, 32, 2, 32, kRecords ? 16 : 32, 3, 1>,
                      mla::PortableTraits<kD, 32, 2, 16, 16, 3, 1>, Least>(p, device, stream);
}

}  // namespace

cudaError_t launch_mqa_decode(const MqaDecodeParams& params, const Tuning& tuning,
                              const Device& device, cudaStream_t stream) {
  const TunedParams p = {params, tuning};
  if (p.records) return launch_latent<576, true>(p, device, stream);
  if (p.v) return launch_portable_values(p, device, stream);
  if (p.dim == 576) return launch_latent<576>(p, device, stream);
  return p.dim == 512 ? launch_latent<512>(p, device, stream) : cudaErrorInvalidValue;
}

}  // namespace jax_dsa::portable
