// Launches a decode kernel and the kernel that combines its KV splits.
#pragma once

#include "common/launch.cuh"
#include "mqa_decode/plan.cuh"

namespace jax_dsa::mqa_decode {

// Launches `kernel` with kCtasPerSm CTAs per SM. See PartialLine for kWide.
template <typename Shared, int kCtasPerSm, bool kWide>
cudaError_t launch_kernel(void (*kernel)(Decode), const TunedParams& params, int tile_rows,
                          int threads, cudaStream_t stream) {
  static_assert(shared_memory_fits(kCtasPerSm, sizeof(Shared)));
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const Decode p(params, tile_rows, kCtasPerSm * std::min(device.num_sms, kMaxSms));
  if (!p.costs_fit()) return cudaErrorInvalidValue;
  const int64_t ctas = int64_t{p.cta_groups} * p.cta_group_size;
  const cudaError_t e = launch_blocks(kernel, ctas, threads, sizeof(Shared), stream, p);
  if (e != cudaSuccess || !p.may_split()) return e;
  return launch_combine(p, tile_rows, kWide, stream);
}

}  // namespace jax_dsa::mqa_decode
