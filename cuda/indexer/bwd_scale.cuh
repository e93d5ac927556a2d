// Lightning indexer, backward pass over selected keys, last kernel: the factor k_scale.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "indexer/indexer.h"

namespace jax_dsa::indexer_bwd {

// Reads f, the gradient without k_scale, from dk and writes dk = k_scale f and dk_scale = k . f.
// Each warp processes one key.
static __global__ void __launch_bounds__(256)
    scale_kernel(const __grid_constant__ IndexerBwdParams p) {
  const int64_t key = blockIdx.x * int64_t{8} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (key >= p.batch * p.keys) return;
  const auto finite = [](float x) { return fabsf(x) < INFINITY ? x : 0.f; };
  const float scale = finite(p.k_scale[key]);
  const auto* k = static_cast<const __nv_bfloat16*>(p.k) + key * p.channels;
  float* f = p.dk + key * p.channels;
  float sum = 0.f;
  for (int c = lane; c < p.channels; c += 32) {
    sum = fmaf(finite(__bfloat162float(k[c])), f[c], sum);
    f[c] *= scale;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) p.dk_scale[key] = sum;
}

}  // namespace jax_dsa::indexer_bwd
