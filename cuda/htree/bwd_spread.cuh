// Computes the tokens' gradients from those of all nodes: the gradient of a mean is divided
// equally among the nodes that it is the mean of.
#pragma once

#include <cuda_bf16.h>

#include "htree/bwd_plan.cuh"

namespace jax_dsa::htree {

struct Spread {
  HTreeLayers layers;
  const float* gradients;
  const float* rotations;
  __nv_bfloat16* dk;  // [B, S, G, D]
  __nv_bfloat16* dv;
  int64_t tokens, groups;
  float key_factor, value_factor;
};

inline constexpr int kSpreadThreads = 256;

// A thread handles a pair of columns of one token, of dK and of dV.
template <int kD, int kR>
__global__ void __launch_bounds__(kSpreadThreads) spread_kernel(const __grid_constant__ Spread x) {
  constexpr int kPairs = kD / 2, kTokens = kSpreadThreads / kPairs;  // per CTA
  const int64_t spans = ceil_div(x.tokens, int64_t{kTokens});
  const int64_t bg = blockIdx.x / spans;
  const int64_t token = blockIdx.x % spans * kTokens + threadIdx.x / kPairs;
  const int pair = threadIdx.x % kPairs;
  if (token >= x.tokens) return;
  float key[2] = {}, value[2] = {}, weight = 1.f;
  int64_t node = token;
  for (int layer = 0; layer < x.layers.count; ++layer) {
    const int64_t block = node / kR;
    const int slot = static_cast<int>(node % kR);
    const auto add = [&](int64_t place, int64_t ordinal) {
      const float* const from =
          x.gradients +
          ((bg * x.layers.blocks + x.layers.first[layer] + place) * 2 * kR + slot) * kD + pair;
      const float2 rotation =
          __ldg(reinterpret_cast<const float2*>(x.rotations) + ordinal * kPairs + pair);
      const float low = from[0], high = from[kPairs];
      key[0] += weight * (low * rotation.x + high * rotation.y);
      key[1] += weight * (high * rotation.x - low * rotation.y);
      value[0] += weight * from[kR * kD];
      value[1] += weight * from[kR * kD + kPairs];
    };
    if (block < x.layers.prefix_blocks[layer]) add(block, node);
    if (layer + 1 < x.layers.count) add(x.layers.prefix_blocks[layer] + block, slot);
    weight /= static_cast<float>(min(x.layers.size[layer] - block * kR, int64_t{kR}));
    node = block;
  }
  const int64_t to = ((bg / x.groups * x.tokens + token) * x.groups + bg % x.groups) * kD + pair;
  x.dk[to] = __float2bfloat16(key[0] * x.key_factor);
  x.dk[to + kPairs] = __float2bfloat16(key[1] * x.key_factor);
  x.dv[to] = __float2bfloat16(value[0] * x.value_factor);
  x.dv[to + kPairs] = __float2bfloat16(value[1] * x.value_factor);
}

}  // namespace jax_dsa::htree
