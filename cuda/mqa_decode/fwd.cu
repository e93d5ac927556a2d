// Launcher of the mqa_decode kernels for Hopper.

#include "mqa_decode/few.cuh"
#include "mqa_decode/launch.cuh"
#include "mqa_decode/wide.cuh"

namespace jax_dsa {
namespace mqa_decode {
namespace {

template <int kD, bool kRecords>
cudaError_t launch_wide(const TunedParams& p, cudaStream_t stream) {
  return launch_kernel<WideShared<kD>, 1, true>(wide_kernel<kD, kRecords>, p, kWideRows,
                                                kWideThreads, stream);
}

template <typename Tr, bool kRecords>
cudaError_t launch_few(const TunedParams& p, cudaStream_t stream) {
  return launch_kernel<FewShared<Tr>, kFewCtasPerSm, false>(few_kernel<Tr, kRecords>, p, Tr::kN,
                                                            kFewThreads, stream);
}

// Launches clusters that divide small work tiles. Returns cudaErrorNotSupported if the call is not
// small enough, or if the GPU has no room for such clusters.
template <typename Tr, bool kRecords>
cudaError_t launch_in_clusters(const TunedParams& params, cudaStream_t stream) {
  const auto kernel = few_kernel<Tr, kRecords>;
  constexpr int kBytes = sizeof(FewShared<Tr>);
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const Decode p = Decode::in_clusters_of(params, device.num_sms);
  if (!p.in_clusters) return cudaErrorNotSupported;
  bool fits;
  DSA_RETURN_IF_CUDA_ERROR(cluster_fits(kernel, p.static_splits, kFewThreads, kBytes, &fits));
  if (!fits) return cudaErrorNotSupported;
  return launch_clusters(kernel, p.work_tiles, p.static_splits, kFewThreads, kBytes, stream, p);
}

template <int kD, int kE, bool kSeparateValues, bool kRecords = false>
cudaError_t launch_rows(const TunedParams& p, cudaStream_t stream) {
  using Tr = mla::FewTraits<kD, kClusterRows, kE, kSeparateValues>;
  const cudaError_t status = launch_in_clusters<Tr, kRecords>(p, stream);
  if (status != cudaErrorNotSupported) return status;
  const int rows = mqa_decode_rows(p.queries, p.heads, p.groups, p.dim, p.records);
  if (rows == 16) {
    return launch_few<Tr, kRecords>(p, stream);
  }
  if constexpr (!kRecords) {
    if (rows == 32) {
      return launch_few<mla::FewTraits<kD, 32, kE, kSeparateValues>, kRecords>(p, stream);
    }
  }
  if constexpr (kSeparateValues) {
    return cudaErrorInvalidValue;
  } else {
    return launch_wide<kD, kRecords>(p, stream);
  }
}

}  // namespace

}  // namespace mqa_decode

cudaError_t hopper::launch_mqa_decode(const MqaDecodeParams& params,
                                      const mqa_decode::Tuning& tuning, cudaStream_t stream) {
  using namespace mqa_decode;
  const TunedParams p = {params, tuning};
  if (p.records) return launch_rows<576, 512, false, true>(p, stream);
  if (p.v == nullptr) {
    if (p.dim == 576) return launch_rows<576, 512, false>(p, stream);
    return p.dim == 512 ? launch_rows<512, 512, false>(p, stream) : cudaErrorInvalidValue;
  }
  switch (p.dim) {
    case 64:
      return launch_rows<64, 64, true>(p, stream);
    case 128:
      return launch_rows<128, 128, true>(p, stream);
    case 256:
      return launch_rows<256, 256, true>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa
