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
  return launch_pdl(combine, int64_t{kCombineCtasPerSm} * device.num_sms, kCombineThreads,
                    sizeof(CombineShared), stream, p, tile_rows);
}
