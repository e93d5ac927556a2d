// Launches the portable mqa_decode kernel with given traits.
#pragma once

#include "common/launch.cuh"
#include "mqa_decode/portable_fwd.cuh"

namespace jax_dsa::mqa_decode {

template <typename Tr, bool kRecords>
cudaError_t launch_portable(const TunedParams& params, const Device& device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(PortableShared<Tr, kRecords>);
  const int rows =
      mqa_decode_rows(params.queries, params.heads, params.groups, params.dim, params.records);
  const int fit = (device.shared_bytes + kReservedSharedBytes) / (kBytes + kReservedSharedBytes);
  // The workspace has room for two partial results of each CTA.
  const int64_t ctas =
      std::min(int64_t{std::min(fit, Tr::kCtas)} * std::min(device.num_sms, kMaxSms),
               mqa_decode_workspace(rows).rows / (2 * Tr::kHeads));
  const Decode p(params, Tr::kHeads, static_cast<int>(ctas));
  if (!p.costs_fit()) return cudaErrorInvalidValue;
  const auto kernel = portable_fwd_kernel<Tr, kRecords>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(kernel, int64_t{p.cta_groups} * p.cta_group_size,
                                         Tr::kThreads, kBytes, stream, p));
  return p.may_split() ? launch_combine(p, Tr::kHeads, false, stream) : cudaSuccess;
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
  return launch_portable<Tr, kRecords>(p, device, stream);
}

// Launches the kernel for values of their own.
cudaError_t launch_portable_values(const TunedParams& p, const Device& device, cudaStream_t stream);

}  // namespace jax_dsa::mqa_decode
