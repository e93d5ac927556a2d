// Launcher of the portable mqa_decode kernel.

#include "common/launch.cuh"
#include "mqa_decode/portable_fwd.cuh"

namespace jax_dsa::portable {
namespace {

using namespace mqa_decode;

template <typename Tr, bool kRecords>
cudaError_t launch_traits(const TunedParams& params, const Device& device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(PortableShared<Tr, kRecords>);
  const int rows =
      mqa_decode_rows(params.queries, params.heads, params.groups, params.dim, params.records);
  const int fit = (device.shared_bytes + kReservedSharedBytes) / (kBytes + kReservedSharedBytes);
  // The workspace has room for two partial results of each CTA.
  const int64_t ctas =
      std::min(int64_t{std::min(fit, Tr::kCtas)} * std::min(device.num_sms, kMaxSms),
               mqa_decode_workspace(rows).rows / (2 * Tr::kHeads));
  const Decode p(params, Tr::kHeads, static_cast<int>(ctas));
  const int64_t tiles = ceil_div(p.keys, int64_t{kTile}) + kWorkTileOverhead + 1;
  if ((p.batch * p.groups * p.row_passes + kMaxCtaGroups) * tiles > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = portable_fwd_kernel<Tr, kRecords>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(kernel, int64_t{p.cta_groups} * p.cta_group_size,
                                         Tr::kThreads, kBytes, stream, p));
  return p.cta_groups == 1 ? cudaSuccess : launch_combine(p, Tr::kHeads, false, stream);
}

// Launches with the first traits whose shared memory the GPU has.
template <bool kRecords, typename Tr, typename... Others>
cudaError_t launch_first(const TunedParams& p, const Device& device, cudaStream_t stream) {
  if constexpr (sizeof...(Others) > 0) {
    if (sizeof(PortableShared<Tr, kRecords>) > static_cast<size_t>(device.shared_bytes)) {
      return launch_first<kRecords, Others...>(p, device, stream);
    }
  } else {
    static_assert(sizeof(PortableShared<Tr, kRecords>) <= kMinSharedBytes);
  }
  return launch_traits<Tr, kRecords>(p, device, stream);
}

// The tile sizes by the number of rows: rows per group, groups, keys, keys per warp, slots and CTAs
// per SM.
template <int kD, bool kRecords = false>
cudaError_t launch_latent(const TunedParams& p, const Device& device, cudaStream_t stream) {
  using Least = mla::PortableTraits<kD, 32, 1, 16, 16, 2, 2>;
  const int64_t rows = p.queries * (p.heads / p.groups);
  if (rows <= 16) {
    return launch_first<kRecords, mla::PortableTraits<kD, 16, 1, 32, 16, 2, 2>, Least>(p, device,
                                                                                       stream);
  }
  if (rows <= 32) return launch_first<kRecords, Least>(p, device, stream);
  return launch_first<kRecords, mla::PortableTraits<kD, 32, 2, 32, 16, 3, 1>,
                      mla::PortableTraits<kD, 32, 2, 16, 16, 3, 1>, Least>(p, device, stream);
}

// The same for values of their own.
template <int kD, int kKeys, int kSlots>
cudaError_t launch_separate(const TunedParams& p, const Device& device, cudaStream_t stream) {
  using Few = mla::PortableTraits<kD, 16, 1, kKeys, 16, kSlots, 2, kD, true>;
  using Many = mla::PortableTraits<kD, 32, 1, kKeys, 16, kSlots, 2, kD, true>;
  return p.queries * (p.heads / p.groups) <= 16 ? launch_first<false, Few>(p, device, stream)
                                                : launch_first<false, Many>(p, device, stream);
}

}  // namespace

cudaError_t launch_mqa_decode(const MqaDecodeParams& params, const Tuning& tuning,
                              const Device& device, cudaStream_t stream) {
  const TunedParams p = {params, tuning};
  if (p.records) return launch_latent<576, true>(p, device, stream);
  if (p.v == nullptr) {
    if (p.dim == 576) return launch_latent<576>(p, device, stream);
    return p.dim == 512 ? launch_latent<512>(p, device, stream) : cudaErrorInvalidValue;
  }
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

}  // namespace jax_dsa::portable
