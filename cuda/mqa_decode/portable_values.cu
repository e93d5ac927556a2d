// Instances of the portable mqa_decode kernel for values of their own.

#include "mqa_decode/portable_launch.cuh"

namespace jax_dsa::mqa_decode {
namespace {

// kKeys, kSlots: keys of a tile, and tiles in shared memory.
template <int kD, int kKeys, int kSlots>
cudaError_t launch_separate(const TunedParams& p, const Device& device, cudaStream_t stream) {
  using Few = mla::PortableTraits<kD, 16, 1, kKeys, 16, kSlots, 2, kD, true>;
  using Many = mla::PortableTraits<kD, 32, 1, kKeys, 16, kSlots, 2, kD, true>;
  return p.queries * (p.heads / p.groups) <= 16 ? launch_first<false, Few>(p, device, stream)
                                                : launch_first<false, Many>(p, device, stream);
}

}  // namespace

cudaError_t launch_portable_values(const TunedParams& p, const Device& device,
                                   cudaStream_t stream) {
  switch (p.dim) {
    case 64:
      return launch_separate<64, 64, 3>(p, device, stream);
    case 128:
      return launch_separate<128, 64, 2>(p, device, stream);
    case 256:
      return launch_separate<256, 32, 2>(p, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa::mqa_decode
