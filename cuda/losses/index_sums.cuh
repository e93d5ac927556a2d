// The backward pass of the indexer's logits at all keys, apart from its products (index_grads.cuh).
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "common/types.h"
#include "losses/losses.h"
#include "losses/ranges.cuh"

namespace jax_dsa::index_grads {

// Adds up f over the segments. One warp per key, four channels per lane. After the last chunk of
// queries, it computes dk and dk_scale from f.
static __global__ void __launch_bounds__(256)
    sum_segments_kernel(const __grid_constant__ IndexGradsParams p) {
  const int64_t row = blockIdx.x * int64_t{8} + threadIdx.x / 32;  // batch * keys + key
  const int channel = threadIdx.x % 32 * 4;
  if (row >= p.batch * p.keys) return;
  const int64_t batch = row / p.keys, key = row - batch * p.keys;
  const int64_t key_tiles = ceil_div(p.keys, int64_t{kIndexGradsKeys});
  const int64_t segments = ceil_div(p.queries, int64_t{kIndexGradsSegment});
  const bool in_range = channel < p.channels;
  float* const dk = p.dk + row * p.channels + channel;
  float f[4] = {};
  const auto add = [&](const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    f[0] += x.x, f[1] += x.y, f[2] += x.z, f[3] += x.w;
  };
  if (in_range && !p.first) add(dk);
  for (int64_t segment = 0; segment < segments; ++segment) {
    const int64_t at = segment * p.batch + batch;
    if (!p.partial_used[at * key_tiles + key / kIndexGradsKeys] || !in_range) continue;
    add(p.partial_dk + (at * p.keys + key) * p.channels + channel);
  }
  if (p.last && p.k_scale != nullptr) {
    // For a key that no query sees, f is 0 but k and k_scale may be NaN. The result must be 0.
    const auto finite = [](float x) { return fabsf(x) < INFINITY ? x : 0.f; };
    const float scale = finite(__ldg(p.k_scale + row));
    float sum = 0.f;
    if (in_range) {
      const auto* k = reinterpret_cast<const uint32_t*>(p.k) + (row * p.channels + channel) / 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 x = unpack_bf16(k[i]);
        sum = fmaf(finite(x.x), f[2 * i], fmaf(finite(x.y), f[2 * i + 1], sum));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] *= scale;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (channel == 0) p.dk_scale[row] = sum;
  }
  if (in_range) store_4(dk, f);
}

// Writes zeros to dq and dw of the queries that see no key.
static __global__ void __launch_bounds__(256)
    clear_queries_kernel(const __grid_constant__ IndexGradsParams p) {
  const int64_t token = blockIdx.x;
  const Range seen = range_of(p, token / p.queries, token % p.queries);
  if (seen.low < seen.high) return;
  const int values = p.heads * p.channels;
  for (int i = threadIdx.x; i < values; i += 256) p.dq[token * values + i] = 0.f;
  for (int i = threadIdx.x; i < p.heads; i += 256) p.dweights[token * p.heads + i] = 0.f;
}

}  // namespace jax_dsa::index_grads
