// Launcher of the kernel that combines KV splits.

#include "common/device.h"
#include "common/launch.cuh"
#include "mqa_decode/combine.cuh"

cudaError_t jax_dsa::mqa_decode::launch_combine(const Decode& p, int tile_rows, bool wide,
                                                cudaStream_t stream) {
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const auto combine = wide                     ? combine_kernel<true, 2>
                       : p.value_dim % 256 == 0 ? combine_kernel<false, 2>
                                                : combine_kernel<false, 1>;
  int ctas = kCombineCtasPerSm * device.num_sms;
  if (p.static_splits > 0 && p.static_splits <= kWarpSplits) {
    // CTAs for which the first kernel leaves space start before its end.
    const int busy = ceil_div(p.cta_groups * p.cta_group_size, mqa_decode_ctas_per_sm(tile_rows));
    const int needed = ceil_div(combine_jobs<2>(p, p.work_tiles, tile_rows), kCombineWarps);
    ctas = std::min(std::max(kCombineCtasPerSm * (device.num_sms - busy), needed), ctas);
  }
  return launch_pdl(combine, ctas, kCombineThreads, sizeof(CombineShared), stream, p, tile_rows);
}
