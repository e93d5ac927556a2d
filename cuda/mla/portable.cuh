// Building blocks of the kernels of MLA that use only instructions of sm_80: gathered key tiles,
// and the scores of a group of heads.
//
// A CTA holds the Q of kGroups groups of kRows heads in shared memory. A group has four warps,
// which compute the scores of its heads with a tile of kKeys gathered keys. Each warp multiplies
// all heads with kScoreKeys of the keys, over one of kParts slices of the columns. The products
// meet in shared memory in float32: a larger product per warp reads less shared memory than the
// exchange costs.
#pragma once

#include <cstdint>

#include "common/mma_tile.cuh"
#include "common/softmax.cuh"
#include "mla/layout.h"

namespace jax_dsa::mla {

inline constexpr int kGroupThreads = 128;

// kSlots: key tiles in shared memory. kCtas: CTAs per SM.
template <int kD_, int kRows_, int kGroups_, int kKeys_, int kScoreKeys_, int kSlots_, int kCtas_>
struct PortableTraits {
  static constexpr int kD = kD_, kRows = kRows_, kGroups = kGroups_, kKeys = kKeys_;
  static constexpr int kScoreKeys = kScoreKeys_, kSlots = kSlots_, kCtas = kCtas_;
  static constexpr int kHeads = kRows * kGroups, kThreads = kGroups * kGroupThreads;
  static constexpr int kBlocks = kD / 64;
  static constexpr int kWarpsPerPart = kKeys / kScoreKeys, kParts = 4 / kWarpsPerPart;
  // A row of scores belongs to kLanes lanes of one warp, each of which has kLaneKeys keys.
  static constexpr int kWarpRows = kRows / 4, kLanes = 32 / kWarpRows, kLaneKeys = kKeys / kLanes;
  static_assert(kRows % 16 == 0 && kScoreKeys % 16 == 0 && kParts * kWarpsPerPart == 4);
  static_assert(kLaneKeys % 4 == 0 && kKeys <= 64);
};

// The index of this thread's group, in a uniform register.
__device__ __forceinline__ int group_index() { return uniform(threadIdx.x / kGroupThreads); }

// Waits for the other warps of the group.
__device__ __forceinline__ void sync_group() {
  named_barrier_sync<kGroupThreads>(1 + threadIdx.x / kGroupThreads);
}

// ---- gathered tiles -----------------------------------------------------------------------------

// Calls f(i, row) for each row of a tile that a thread copies a part of: eight threads copy a row.
template <int kRows, int kThreads, typename F>
__device__ __forceinline__ void for_each_row(F f) {
  constexpr int kStep = kThreads / 8;
#pragma unroll
  for (int i = 0; i < ceil_div(kRows, kStep); ++i) {
    const int row = i * kStep + threadIdx.x / 8;
    if (kRows % kStep == 0 || row < kRows) f(i, row);
  }
}

// Copies the part of row `row` that belongs to this thread: one 16-byte chunk of each block. An
// invalid row becomes zero.
template <int kRows, int kBlocks>
__device__ __forceinline__ void gather_row(uint32_t tile, int row, const char* from, bool valid,
                                           uint64_t policy) {
  const int chunk = threadIdx.x % 8;
  const uint32_t to = whole_sum(tile, row * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    cp_async_16(to + b * (kRows * 128), from + chunk * 16 + b * 128, valid, policy);
  }
}

// ---- scores -------------------------------------------------------------------------------------

// Returns the index of 4 scores of a row in the kParts [kRows, kKeys] scores of a group.
// Neighboring rows fall on different banks, both for accumulator fragments and for lanes that read
// 16 bytes.
template <typename Tr>
__device__ __forceinline__ int score_index(int row, int chunk) {
  const int swizzle = Tr::kKeys >= 32 ? row % 4 * 2 + row / 4 % 2 : row / 2 % 2 * 2 + row / 4 % 2;
  return row * Tr::kKeys + (chunk ^ swizzle) * 4;
}

// Computes this warp's part of the scores of a group, Q K^T, and stores it at `scores`. `q` and
// `keys` are the addresses of the tiles.
template <typename Tr>
__device__ __forceinline__ void multiply_scores(uint32_t q, uint32_t keys, int group,
                                                float* scores) {
  constexpr int kSlice = 64 / Tr::kParts;
  const int warp = uniform(threadIdx.x / 32 % 4), part = warp / Tr::kWarpsPerPart;
  const int key = warp % Tr::kWarpsPerPart * Tr::kScoreKeys;
  float s[Tr::kRows / 16][Tr::kScoreKeys / 2];
  clear_fragments(s);
  multiply_tiles<DType::kBF16, Tr::kD / 16 / Tr::kParts>(
      s, Operand<Side::kA, false, Tr::kHeads, kSlice>(q, group * Tr::kRows, part * kSlice),
      Operand<Side::kB, false, Tr::kKeys, kSlice>(keys, key, part * kSlice));
  const int lane = thread_index() % 32;
  scores += part * (Tr::kRows * Tr::kKeys) + lane % 2 * 2;
#pragma unroll
  for (int m = 0; m < Tr::kRows / 16; ++m) {
#pragma unroll
    for (int i = 0; i < Tr::kScoreKeys / 2; i += 2) {
      const int row = m * 16 + i / 2 % 2 * 8 + lane / 4;
      const int chunk = key / 4 + i / 4 * 2 + lane % 4 / 2;
      *reinterpret_cast<float2*>(scores + score_index<Tr>(row, chunk)) =
          make_float2(s[m][i], s[m][i + 1]);
    }
  }
}

// The row of its group whose scores this lane processes, and the first of its keys.
template <typename Tr>
__device__ __forceinline__ int lane_row() {
  return thread_index() / 32 % 4 * Tr::kWarpRows + thread_index() % Tr::kWarpRows;
}
template <typename Tr>
__device__ __forceinline__ int lane_key() {
  return thread_index() % 32 / Tr::kWarpRows * Tr::kLaneKeys;
}

// Loads this lane's scores, the sums over all parts. Scores of keys that are not valid become -inf.
template <typename Tr>
__device__ __forceinline__ void load_scores(const float* scores, const uint8_t* valid,
                                            float (&s)[Tr::kLaneKeys]) {
  const int row = lane_row<Tr>(), key = lane_key<Tr>();
#pragma unroll
  for (int i = 0; i < Tr::kLaneKeys; i += 4) {
    const float* const from = scores + score_index<Tr>(row, (key + i) / 4);
    float4 x = *reinterpret_cast<const float4*>(from);
#pragma unroll
    for (int part = 1; part < Tr::kParts; ++part) {
      const float4 y = *reinterpret_cast<const float4*>(from + part * (Tr::kRows * Tr::kKeys));
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
    }
    const uint32_t bytes = *reinterpret_cast<const uint32_t*>(valid + key + i);
    s[i] = bytes & 0xff ? x.x : -INFINITY;
    s[i + 1] = bytes & 0xff00 ? x.y : -INFINITY;
    s[i + 2] = bytes & 0xff0000 ? x.z : -INFINITY;
    s[i + 3] = bytes & 0xff000000 ? x.w : -INFINITY;
  }
}

// Applies `f` to `x` of all lanes of a row.
template <typename Tr, typename F>
__device__ __forceinline__ float over_row(float x, F f) {
#pragma unroll
  for (int i = Tr::kWarpRows; i < 32; i *= 2) x = f(x, __shfl_xor_sync(~0u, x, i));
  return x;
}

// Softmax state of a row.
struct PortableRow {
  float running_max = -INFINITY;  // -inf before the first valid score
  float sum = 0.f;                // of this lane's probabilities, relative to the running maximum

  // Replaces scores by probabilities relative to the running maximum, which follows the scores if
  // they exceed it by more than `margin`. Returns the factor for what is relative to the old one.
  template <typename Tr>
  __device__ __forceinline__ float softmax(float (&s)[Tr::kLaneKeys], float scale, float margin) {
    float top = s[0];
#pragma unroll
    for (int i = 1; i < Tr::kLaneKeys; ++i) top = fmaxf(top, s[i]);
    top = __fmul_rn(over_row<Tr>(top, [](float a, float b) { return fmaxf(a, b); }), scale);
    float factor = 1.f;
    if (top > running_max + margin) {
      factor = exp2_approx((running_max - top) * kLog2E);
      running_max = top;
    }
    float factor_log2 = scale * kLog2E, base = finite_max(running_max) * kLog2E;
    if (fabsf(base) > kExactBaseLimit) {
#pragma unroll
      for (int i = 0; i < Tr::kLaneKeys; ++i) s[i] = __fmul_rn(s[i], scale) - running_max;
      factor_log2 = kLog2E, base = 0.f;
    }
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < Tr::kLaneKeys; ++i) {
      s[i] = exp2_approx(fmaf(s[i], factor_log2, -base));
      total += s[i];
    }
    sum = sum * factor + total;
    return factor;
  }
};

// Stores this lane's probabilities in the tile of a group, at address `tile`, as bf16. The first
// key has column kColumn, a multiple of 8.
template <typename Tr, int kColumn = 0>
__device__ __forceinline__ void store_probabilities(uint32_t tile,
                                                    const float (&s)[Tr::kLaneKeys]) {
  const int row = lane_row<Tr>(), key = lane_key<Tr>() + kColumn;
#pragma unroll
  for (int i = 0; i < Tr::kLaneKeys; i += 4) {
    const uint32_t to = tile + row * 128 + (((key + i) / 8) ^ row % 8) * 16 + (key + i) % 8 * 2;
    store_shared_8(to, pack_bf16(s[i], s[i + 1]), pack_bf16(s[i + 2], s[i + 3]));
  }
}

}  // namespace jax_dsa::mla
