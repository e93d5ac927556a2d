// Mean pooling, forward and backward kernels. In each channel,
//
//     y = (((v_0 + v_1) + v_2) + ...) * (1 / ratio)        dv_i = dy * (1 / ratio)
//
// in float32 and in this order, with one rounding. Both passes are bound by memory bandwidth. They
// read and write each element once. Blocks and slots are those of pool.cuh.
//
// A warp computes 128 channels, four per lane: forward of one or two keys, backward of kRowsPerWarp
// rows, which read their keys' gradients through the L1 cache. A thread issues kAtOnce loads before
// it uses the first one.
#pragma once

#include "gated_pool/blocks.cuh"

namespace jax_dsa::gated_pool {

inline constexpr int kWarps = kThreads / 32;
inline constexpr int kMeanTile = 32 * kWidth;  // channels per warp
inline constexpr int kAtOnce = 8;              // loads that a thread issues at once
inline constexpr int kRowsPerWarp = 8;

// The place of a warp, which processes the unit `unit` of a batch entry.
struct MeanWarp {
  int64_t entry;
  int unit, channel;
  bool active;  // false for lanes past the last channel

  __device__ MeanWarp(const MeanPoolParams& p, uint32_t units_per_entry, uint32_t tiles) {
    const uint32_t index = blockIdx.x / tiles * kWarps + threadIdx.x / 32;
    entry = index / units_per_entry;
    unit = static_cast<int>(index % units_per_entry);
    channel = static_cast<int>(blockIdx.x % tiles * kMeanTile + threadIdx.x % 32 * kWidth);
    active = channel < p.dim;
  }
};

// The keys of a warp of the forward kernel. kRatio is the ratio, or 0 if it comes from the call.
template <int kRatio>
inline constexpr int kKeysPerWarp = kRatio > 0 ? kAtOnce / kRatio : 1;

template <DType kType, int kRatio, bool kPacked>
__global__ void __launch_bounds__(kThreads)
    mean_fwd_kernel(const __grid_constant__ MeanPoolParams p, uint32_t units_per_entry,
                    uint32_t tiles) {
  constexpr int kKeys = kKeysPerWarp<kRatio>, kLoads = kAtOnce / kKeys;
  const int ratio = kRatio > 0 ? kRatio : p.ratio, tokens = static_cast<int>(p.tokens);
  const int slots = tokens / ratio;
  const MeanWarp warp(p, units_per_entry, tiles);
  if (warp.entry >= p.batch) return;
  int last[kKeys];  // row of the block's last token; -1 if the slot has no block
#pragma unroll
  for (int k = 0; k < kKeys; ++k) {
    const int slot = warp.unit * kKeys + k;
    if constexpr (kPacked) {
      last[k] = find_last_row(p.starts + warp.entry * p.tokens, slot, ratio, tokens);
    } else {
      last[k] = slot < slots ? (slot + 1) * ratio - 1 : -1;
    }
  }
  if (!warp.active) return;
  const auto* const from =
      static_cast<const Element<kType>*>(p.from) + warp.entry * p.tokens * p.dim + warp.channel;
  float sum[kKeys][kWidth] = {};
  for (int first = 0; first < ratio; first += kLoads) {
    Packed4<kType> values[kKeys][kLoads];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = last[k] - ratio + 1 + first + i;
        values[k][i] = {};
        if (last[k] >= 0 && first + i < ratio) {
          values[k][i] = load<kType>(from + int64_t{row} * p.dim);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i >= ratio) break;
        float x[kWidth];
        widen<kType>(values[k][i], x);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) sum[k][c] = first + i == 0 ? x[c] : sum[k][c] + x[c];
      }
    }
  }
  const int64_t first_key = warp.entry * slots + warp.unit * kKeys;
  auto* const to = static_cast<Element<kType>*>(p.to) + first_key * p.dim + warp.channel;
#pragma unroll
  for (int k = 0; k < kKeys; ++k) {
    if (warp.unit * kKeys + k >= slots) break;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) sum[k][c] *= p.factor;
    store<kType>(to + k * p.dim, narrow<kType>(sum[k]));
  }
}

template <DType kType, bool kPacked>
__global__ void __launch_bounds__(kThreads)
    mean_bwd_kernel(const __grid_constant__ MeanPoolParams p, uint32_t units_per_entry,
                    uint32_t tiles) {
  const int tokens = static_cast<int>(p.tokens), ratio = p.ratio, slots = tokens / ratio;
  const MeanWarp warp(p, units_per_entry, tiles);
  if (warp.entry >= p.batch) return;
  const int first = warp.unit * kRowsPerWarp, rows = min(kRowsPerWarp, tokens - first);
  // Each of the first lanes finds the slot of one row, -1 if its block is not whole.
  const int own = first + min(static_cast<int>(threadIdx.x) % 32, rows - 1);
  const int32_t* const starts = p.starts + (kPacked ? warp.entry * p.tokens : 0);
  const int start = kPacked ? min(max(__ldg(starts + own), 0), own) : 0;
  const int block = (own - start) / ratio, last = start + (block + 1) * ratio - 1;
  const bool whole = last < tokens && (!kPacked || __ldg(starts + last) == start);
  const int slot = whole ? start / ratio + block : -1;
  const int64_t keys = warp.entry * slots, to = warp.entry * p.tokens + first;
  const auto* const dkeys = static_cast<const Element<kType>*>(p.from) + warp.channel;
  Packed4<kType> dkey[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row_slot = __shfl_sync(~0u, slot, i);
    dkey[i] = {};
    if (warp.active && row_slot >= 0) {
      dkey[i] = __ldg(reinterpret_cast<const Packed4<kType>*>(dkeys + (keys + row_slot) * p.dim));
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    if (!warp.active || i >= rows) break;
    float x[kWidth];
    widen<kType>(dkey[i], x);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) x[c] *= p.factor;
    store<kType>(static_cast<Element<kType>*>(p.to) + (to + i) * p.dim + warp.channel,
                 narrow<kType>(x));
  }
}

}  // namespace jax_dsa::gated_pool
