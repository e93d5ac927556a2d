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

cudaError_t mqa_decode::launch_plan(const MqaDecodeParams& p, const Tuning& tuning,
                                    MqaDecodeRange* plan, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) {
    return cudaMemsetAsync(plan, 0, kMqaDecodePlanRanges * sizeof(MqaDecodeRange), stream);
  }
  if (p.groups <= 0 || p.heads % p.groups != 0 || p.queries * p.batch * p.heads > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  return launch_tier(
      [&](const Device&) { return hopper::launch_mqa_decode_plan(p, tuning, plan, stream); },
      [](const Device&) { return cudaErrorNotSupported; });
}

cudaError_t launch_mqa_decode(const MqaDecodeParams& p, cudaStream_t stream) {
  return mqa_decode::launch(p, {}, stream);
}

cudaError_t launch_mqa_decode_plan(const MqaDecodeParams& p, MqaDecodeRange* plan,
                                   cudaStream_t stream) {
  return mqa_decode::launch_plan(p, {}, plan, stream);
}

}  // namespace jax_dsa
