// The tree: all layers pooled from the tokens' keys and values, keys rotated.
//
// A thread block takes the nodes below one node two layers up, r^2 of them, from `source`. Teams of
// D / 4 threads have a block of siblings each: a thread 8 columns of the keys, or of the values,
// and a warp either keys, to be rotated, or values. The rotations of all slots are in shared
// memory. They write its rows, and their mean, rounded, is a row of the layer above; the thread
// block's r means are a block of it. Its mean in turn goes, unrotated, to `above`, which is the
// source of the next pass.
#pragma once

#include <cuda_bf16.h>

#include "common/ptx.cuh"
#include "htree/frequencies.h"
#include "htree/htree.h"

namespace jax_dsa::htree {

struct BuildPlan {
  HTreeLayers layers;
  int layer;               // of the source
  const __nv_bfloat16* k;  // the source's first keys and values
  const __nv_bfloat16* v;
  int64_t batch_stride, group_stride, node_stride;  // of both, in elements
  __nv_bfloat16* above;                             // [B, G, nodes, 2, D], if there is such a layer
  uint8_t* tree;
  const float* rotations;
  int groups;
};

inline constexpr int kRotationThreads = 256;
inline constexpr int kRotationRows = 64;  // of a thread block

// (cos, sin) of position times the pair's frequency.
template <int kHalf>
__global__ void __launch_bounds__(kRotationThreads)
    rotations_kernel(float2* table, int64_t rows, const __grid_constant__ Frequencies frequencies) {
  launch_dependents();
  const int pair = threadIdx.x % kHalf;
  const double frequency = frequencies.revolutions[pair];
  for (int i = threadIdx.x / kHalf; i < kRotationRows; i += kRotationThreads / kHalf) {
    const int64_t row = blockIdx.x * int64_t{kRotationRows} + i;
    if (row >= rows) return;
    double revolutions = static_cast<double>(row) * frequency;
    revolutions -= rint(revolutions);
    table[row * kHalf + pair] = cosine_and_sine(static_cast<float>(revolutions));
  }
}

template <int kD, int kR>
inline constexpr int kBuildThreads = kR * kD / 4;

template <int kD, int kR>
struct BuildShared {
  uint32_t means[kR][kD / 4][4];     // of each team's thread
  float4 rotations[kR][4][kD / 16];  // (cos, sin) of pairs 8 j + 2 i and the next one at [i][j]
};

// A thousand threads a SM: while some wait for rows, others write.
template <int kD, int kR>
__global__ void __launch_bounds__(kBuildThreads<kD, kR>, 1024 / kBuildThreads<kD, kR>)
    build_kernel(const __grid_constant__ BuildPlan p) {
  constexpr int kGroupThreads = kD / 4;
  constexpr int64_t kNodeBytes = kR * kD * 2 * 2;
  auto& shared = dynamic_shared<BuildShared<kD, kR>>();
  launch_dependents();
  if (p.layer > 0) grid_dependency_wait();  // for the source
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool is_value = warp % 2;
  const int thread_group = warp / 2 * (64 / kGroupThreads) + lane / (kGroupThreads / 2),
            chunk = lane % (kGroupThreads / 2);
  const int group_thread = is_value * (kGroupThreads / 2) + chunk, column = chunk * 8;
  const bool is_upper = column >= kD / 2;  // of a key's pairs
  const int64_t size = p.layers.size[p.layer];
  const int64_t spans = ceil_div(size, int64_t{kR} * kR);
  const int64_t span = blockIdx.x % spans, bg = blockIdx.x / spans;
  uint8_t* const tree = p.tree + bg * p.layers.blocks * kNodeBytes;
  const __nv_bfloat16* const source = (is_value ? p.v : p.k) + bg / p.groups * p.batch_stride +
                                      bg % p.groups * p.group_stride + column;

  // Row `slot` of a layer's block; all threads of a warp come here together.
  const auto write = [&](int layer, int64_t block, int slot, const uint32_t (&x)[4], bool valid) {
    uint32_t partner[4] = {};
    if (!is_value) {
#pragma unroll
      for (int i = 0; i < 4; ++i) partner[i] = __shfl_xor_sync(~0u, x[i], kD / 16);
    }
    const auto put = [&](int64_t place, auto rotation_of) {
      uint32_t y[4] = {x[0], x[1], x[2], x[3]};
      if (!is_value) {
        const float sign = is_upper ? 1.f : -1.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 cs = rotation_of(i);
          const float2 a = unpack_bf16(x[i]), b = unpack_bf16(partner[i]);
          y[i] = pack_bf16(a.x * cs.x + sign * (b.x * cs.y), a.y * cs.z + sign * (b.y * cs.w));
        }
      }
      uint8_t* const to = tree + (p.layers.first[layer] + place) * kNodeBytes +
                          (is_value ? kNodeBytes / 2 : 0) + slot * (kD * 2) +
                          (chunk ^ slot % 8) * 16;
      *reinterpret_cast<uint4*>(to) = make_uint4(y[0], y[1], y[2], y[3]);
    };
    const int64_t prefix = p.layers.prefix_blocks[layer];
    if (valid && block < prefix) {
      const float* const rotation =
          p.rotations + ((block * kR + slot) * (kD / 2) + column % (kD / 2)) * 2;
      put(block, [&](int i) { return reinterpret_cast<const float4*>(rotation)[i]; });
    }
    if (valid && layer + 1 < p.layers.count) {
      put(prefix + block, [&](int i) { return shared.rotations[slot][i][chunk % (kD / 16)]; });
    }
  };
  const auto add = [](float (&sum)[8], const uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 y = unpack_bf16(x[i]);
      sum[2 * i] += y.x, sum[2 * i + 1] += y.y;
    }
  };
  const auto mean = [](const float (&sum)[8], int count, uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = count > 0 ? pack_bf16(sum[2 * i] / count, sum[2 * i + 1] / count) : 0;
    }
  };

  const int64_t block = span * kR + thread_group;
  const int count = static_cast<int>(max(min(size - block * kR, int64_t{kR}), int64_t{0}));
  float sum[8] = {};
  constexpr int kAtOnce = 4;  // by the registers
#pragma unroll 1
  for (int first = 0; first < kR; first += kAtOnce) {
    uint32_t x[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool valid = first + i < count;
      const int64_t node = valid ? block * kR + first + i : 0;
      load_16_now<0>(source + node * p.node_stride, valid, x[i]);
    }
    if (first == 0) {
      if (p.layer == 0) grid_dependency_wait();  // for the rotations
      for (int j = threadIdx.x; j < kR * (kD / 4); j += kBuildThreads<kD, kR>) {
        const int slot = j / (kD / 4), at = j % (kD / 4);
        shared.rotations[slot][at % 4][at / 4] = reinterpret_cast<const float4*>(p.rotations)[j];
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      write(p.layer, block, first + i, x[i], count > 0);
      add(sum, x[i]);
    }
  }
  if (p.layer + 1 == p.layers.count) return;

  uint32_t x[4];
  mean(sum, count, x);
  write(p.layer + 1, span, thread_group, x, true);
  if (p.layer + 2 == p.layers.count) return;

#pragma unroll
  for (int i = 0; i < 4; ++i) shared.means[thread_group][group_thread][i] = x[i];
  __syncthreads();
  if (thread_group > 0) return;
  const int64_t nodes = p.layers.size[p.layer + 1] - span * kR;
  const int means = static_cast<int>(min(nodes, int64_t{kR}));
  float above[8] = {};
  for (int i = 0; i < means; ++i) add(above, shared.means[i][group_thread]);
  mean(above, means, x);
  uint32_t* const to = reinterpret_cast<uint32_t*>(
      p.above + ((bg * p.layers.size[p.layer + 2] + span) * 2 + is_value) * kD + column);
  *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
}

}  // namespace jax_dsa::htree
