// The attention distribution of sparse MLA: probabilities by slot, summed over groups of heads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"

namespace jax_dsa {

// Slot k of a row of indices is valid if 0 <= index < min(keys, end) and k < topk_length. The
// result for other slots is 0.
struct AttnDistFwdParams {
  const void* q;           // [batch, queries, heads, dim], bf16
  const void* kv;          // [batch, keys, groups, dim], bf16
  const int32_t* indices;  // [batch, queries, groups, slots]
  const float* lse;        // [batch, queries, heads]; natural logarithm, without the sink
  const float* log_sum;    // [batch, queries, heads], or null. If given, the logarithm is the sum
                           // of `lse`, a row's largest score, and this
  const int32_t* ends;     // [batch, queries], or null: all keys are visible
  const int32_t* topk_length;  // [batch, queries], or null: all slots are valid
  const float* sinks;          // [batch, heads], or [heads] with sinks_stride = 0, or null
  float* out;                  // [batch, heads / head_group, queries, slots]
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;       // a multiple of groups
  int groups;      // KV head groups
  int head_group;  // consecutive heads per sum; divides heads / groups
  int slots;
  int dim;  // 576, 512, 256, 192, 128 or 64; the Hopper kernel takes the first two
  int sinks_stride;
  float scale;
};

cudaError_t launch_attn_dist_fwd(const AttnDistFwdParams& params, cudaStream_t stream);

namespace hopper {
cudaError_t launch_attn_dist_fwd(const AttnDistFwdParams& params, cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_attn_dist_fwd(const AttnDistFwdParams& params, const Device& device,
                                 cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
