// The choice between the kernels of mqa_decode.
#include "mqa_decode/tuning.h"

namespace jax_dsa {

cudaError_t mqa_decode::launch(const MqaDecodeParams& p, const Tuning& tuning,
                               cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (!is_valid(p)) return cudaErrorInvalidValue;
  return launch_tier(
      [&](const Device&) { return hopper::launch_mqa_decode(p, tuning, stream); },
      [&](const Device& device) { return portable::launch_mqa_decode(p, tuning, device, stream); });
}

cudaError_t launch_mqa_decode(const MqaDecodeParams& p, cudaStream_t stream) {
  return mqa_decode::launch(p, {}, stream);
}

}  // namespace jax_dsa
