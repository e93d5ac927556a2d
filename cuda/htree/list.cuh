// From the most important candidates of a layer to what the other passes read: the nodes that are
// selected, the last candidate among them, and bits by ordinal. A row of ordinals a thread block.
// With kGiven the selection is not made but read.
#pragma once

#include "htree/walk.cuh"

namespace jax_dsa::htree {

inline constexpr int kListThreads = 128;

template <int kR, bool kGiven>
__global__ void __launch_bounds__(kListThreads)
    list_kernel(const __grid_constant__ Plan plan, int layer) {
  const HTreeFwdParams& p = plan.p;
  const QueryChunk& chunk = plan.chunk;
  const int64_t row = blockIdx.x;
  const int k = static_cast<int>(p.top_k);
  const int64_t query = chunk.first_query + row % chunk.queries, bg = row / chunk.queries;
  const int64_t token = (chunk.first_batch + bg / p.groups) * p.queries + query;
  const int n = candidates<kR>(plan, __ldg(p.positions + token), layer);
  auto* const bits = &dynamic_shared<uint32_t>();  // [k]
  for (int i = threadIdx.x; i < k; i += kListThreads) bits[i] = 0;
  __syncthreads();

  const int32_t* const others = kGiven ? nullptr : chunk.ordinals + row * (k - 1);
  const int64_t given =
      ((token * p.groups + bg % p.groups) * (plan.layers.count - 1) + layer - 1) * k;
  const int64_t place = ((layer - 1) * chunk.rows + row) * k;
  const bool prefix = sees_prefix<kR>(plan, __ldg(p.positions + token), layer);
  const int32_t* const parents = chunk.nodes + (layer * chunk.rows + row) * k;
  for (int i = threadIdx.x; i < k; i += kListThreads) {
    int ordinal;
    if constexpr (kGiven) {
      ordinal = p.selected[given + i];
    } else {
      ordinal = i + 1 < k ? others[i] : -1;
      const bool ends = ordinal < 0 && (i == 0 || others[i - 1] >= 0);
      if (ends) ordinal = n - 1;
    }
    int node = -1;
    if (ordinal >= 0) {
      const int slot = ordinal % kR;
      node = prefix ? ordinal : parents[ordinal / kR] * kR + slot;
      atomicAdd(&bits[ordinal / kR], 1u << slot);
    }
    chunk.nodes[place + i] = node;
    if (!kGiven && p.selected) p.selected[given + i] = static_cast<int16_t>(ordinal);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < k; i += kListThreads) chunk.masks[place + i] = bits[i];
}

}  // namespace jax_dsa::htree
