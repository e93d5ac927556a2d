// Building blocks of kernels for few queries that use only instructions of sm_80: gathered key
// tiles, the scores of a group of heads, and the loop over the tiles (`attend_tiles`).
//
// A CTA holds the Q of kGroups groups of kRows heads in shared memory. A group has four warps,
// which compute the scores of its heads with a tile of kKeys gathered keys. Each warp multiplies
// all heads with kScoreKeys of the keys, over one of kParts slices of the columns. The products
// meet in shared memory in float32: a larger product per warp reads less shared memory than the
// exchange costs. The outputs are in registers; each warp of a group has a quarter of the columns.
#pragma once

#include <cstdint>

#include "common/mma_tile.cuh"
#include "common/softmax.cuh"
#include "mla/layout.h"

namespace jax_dsa::mla {

inline constexpr int kGroupThreads = 128;

// kSlots: key tiles in shared memory. kCtas: CTAs per SM. kE: columns of the values, which are the
// first columns of the keys unless kSeparateValues.
template <int kD_, int kRows_, int kGroups_, int kKeys_, int kScoreKeys_, int kSlots_, int kCtas_,
          int kE_ = kMlaValueDim, bool kSeparateValues_ = false>
struct PortableTraits {
  static constexpr int kD = kD_, kRows = kRows_, kGroups = kGroups_, kKeys = kKeys_;
  static constexpr int kScoreKeys = kScoreKeys_, kSlots = kSlots_, kCtas = kCtas_;
  static constexpr int kHeads = kRows * kGroups, kThreads = kGroups * kGroupThreads;
  static constexpr int kE = kE_;
  static constexpr bool kSeparateValues = kSeparateValues_;
  static constexpr int kBlocks = kD / 64, kValueBlocks = kE / 64;
  // A tile consists of the blocks of its keys, then those of separate values.
  static constexpr int kFirstValueBlock = kSeparateValues ? kBlocks : 0;
  static constexpr int kTileBlocks = kSeparateValues ? kBlocks + kValueBlocks : kBlocks;
  static constexpr int kOutputs = kE / 8;  // of a thread, in 16 rows
  static constexpr int kOutputSlice = kE / 4 < 64 ? kE / 4 : 64;
  static constexpr int kWarpsPerPart = kKeys / kScoreKeys, kParts = 4 / kWarpsPerPart;
  // A row of scores belongs to kLanes lanes of one warp, each of which has kLaneKeys keys.
  static constexpr int kWarpRows = kRows / 4, kLanes = 32 / kWarpRows, kLaneKeys = kKeys / kLanes;
  static_assert(kRows % 16 == 0 && kScoreKeys % 16 == 0 && kParts * kWarpsPerPart == 4);
  static_assert(kLaneKeys % 4 == 0 && kKeys <= 64);
};

template <typename Tr>
struct alignas(128) PortableShared {
  uint8_t q[Tr::kBlocks][Tr::kHeads * 128];
  uint8_t keys[Tr::kSlots][Tr::kTileBlocks][Tr::kKeys * 128];
  uint8_t probabilities[Tr::kGroups][Tr::kRows * 128];
  float scores[Tr::kGroups][Tr::kParts * Tr::kRows * Tr::kKeys];
  float factor[Tr::kGroups][Tr::kRows];  // of a group's outputs
  // Which keys are valid. The operators may give the upper bits a meaning.
  alignas(16) uint8_t valid[Tr::kSlots][Tr::kKeys];
};

// The index of this thread's group, in a uniform register.
__device__ __forceinline__ int group_index() { return uniform(threadIdx.x / kGroupThreads); }

// This thread's lane, and its warp within the group. They are unsigned, so that divisions by powers
// of two are shifts.
__device__ __forceinline__ uint32_t lane_index() { return thread_index() & 31u; }
__device__ __forceinline__ uint32_t group_warp() { return (thread_index() >> 5) & 3u; }

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

// Each lane of a warp looks up one of the rows of a tile of which the warp copies parts. These are
// the row that a lane looks up, and what was looked up for the thread's i-th row in for_each_row.
template <int kRows, int kThreads>
__device__ __forceinline__ int lookup_row() {
  constexpr int kStep = kThreads / 8;
  const int lane = threadIdx.x % 32;
  return lane / 4 % ceil_div(kRows, kStep) * kStep + threadIdx.x / 32 * 4 + lane % 4;
}
__device__ __forceinline__ int looked_up(int x, int i) {
  return __shfl_sync(~0u, x, i * 4 + threadIdx.x % 32 / 8);
}

// Copies the part of row `row` that belongs to this thread: one 16-byte chunk of each block. An
// invalid row becomes zero.
template <int kRows, int kBlocks>
__device__ __forceinline__ void gather_row(uint32_t tile, int row, const char* from, bool valid,
                                           uint64_t policy) {
  const int chunk = threadIdx.x % 8;
  const uint32_t to = whole_sum(tile, row * 128 + (chunk ^ row % 8) * 16);
  from += opaque(chunk * 16);  // so that the blocks' addresses differ by constants
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    cp_async_16(to + b * (kRows * 128), from + b * 128, valid, policy);
  }
}

// ---- scores -------------------------------------------------------------------------------------

// Returns the index of 4 scores of a row in the kParts [kRows, kKeys] scores of a group.
// Neighboring rows fall on different banks, both for accumulator fragments and for lanes that read
// 16 bytes. Rows that are 8 apart have the same order of columns.
template <typename Tr>
__device__ __forceinline__ uint32_t score_index(uint32_t row, uint32_t chunk) {
  const uint32_t swizzle =
      Tr::kKeys >= 32 ? row % 4 * 2 + row / 4 % 2 : row / 2 % 2 * 2 + row / 4 % 2;
  return row * Tr::kKeys + (chunk ^ swizzle) * 4;
}

// The operands of this warp's part of the scores of a group, Q K^T.
template <typename Tr>
struct ScoreOperands {
  static constexpr int kSlice = 64 / Tr::kParts;
  Operand<Side::kA, false, Tr::kHeads, kSlice> q;
  Operand<Side::kB, false, Tr::kKeys, kSlice> keys;

  // `q` and `keys` are the addresses of the tiles.
  __device__ __forceinline__ ScoreOperands(uint32_t q, uint32_t keys, int group)
      : q(q, group * Tr::kRows, group_warp() / Tr::kWarpsPerPart * kSlice),
        keys(keys, group_warp() % Tr::kWarpsPerPart * Tr::kScoreKeys,
             group_warp() / Tr::kWarpsPerPart * kSlice) {}
};

// Computes this warp's part of the scores of a group, and stores it at `scores`.
template <typename Tr, typename Q, typename Keys>
__device__ __forceinline__ void multiply_scores(const Q& q, const Keys& keys, float* scores) {
  const uint32_t warp = group_warp(), part = warp / Tr::kWarpsPerPart;
  const uint32_t key = warp % Tr::kWarpsPerPart * Tr::kScoreKeys;
  float s[Tr::kRows / 16][Tr::kScoreKeys / 2];
  clear_fragments(s);
  multiply_tiles<DType::kBF16, Tr::kD / 16 / Tr::kParts>(s, q, keys);
  const uint32_t lane = lane_index();
  scores += part * (Tr::kRows * Tr::kKeys) + lane % 2 * 2;
#pragma unroll
  for (int i = 0; i < Tr::kScoreKeys / 2; i += 4) {
    float* const to = scores + score_index<Tr>(lane / 4, key / 4 + i / 2 + lane % 4 / 2);
#pragma unroll
    for (int m = 0; m < Tr::kRows / 8; ++m) {
      const float* const x = &s[m / 2][i + m % 2 * 2];
      *reinterpret_cast<float2*>(to + m * (8 * Tr::kKeys)) = make_float2(x[0], x[1]);
    }
  }
}

// The row of its group whose scores this lane processes, and the first of its keys.
template <typename Tr>
__device__ __forceinline__ uint32_t lane_row() {
  return group_warp() * Tr::kWarpRows + lane_index() % Tr::kWarpRows;
}
template <typename Tr>
__device__ __forceinline__ uint32_t lane_key() {
  return lane_index() / Tr::kWarpRows * Tr::kLaneKeys;
}

// Loads this lane's scores, the sums over all parts. Scores of keys that are not valid become -inf.
template <typename Tr>
__device__ __forceinline__ void load_scores(const float* scores, const uint8_t* valid,
                                            float (&s)[Tr::kLaneKeys]) {
  const uint32_t row = lane_row<Tr>(), key = lane_key<Tr>();
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
  float sum = kNoSum;             // of this lane's probabilities, relative to the running maximum

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
  const uint32_t row = lane_row<Tr>(), key = lane_key<Tr>() + kColumn;
#pragma unroll
  for (int i = 0; i < Tr::kLaneKeys; i += 4) {
    const uint32_t to = tile + row * 128 + (((key + i) / 8) ^ row % 8) * 16 + (key + i) % 8 * 2;
    store_shared_8(to, pack_bf16(s[i], s[i + 1]), pack_bf16(s[i + 2], s[i + 3]));
  }
}

// ---- the loop over the key tiles ----------------------------------------------------------------

// Processes the tiles of a work tile, whose Q is in open cp.async groups. `loader` fills the slots:
//   load()           issues the copies of the next tile and closes their group, which is empty
//                    after the last tile
//   unpack()         if kUnpacks: writes the last loaded tile, which has landed, to its slot
//   landed(tile)     is called by all threads when their copies of a tile have landed
//   adjust(tile, s)  changes the scores of this lane, where those of keys that are not valid are
//                    -inf already
//   weigh(tile, s)   changes its probabilities, after their sum has been taken
//
// For each tile, a group multiplies the scores, computes their softmax, and multiplies the
// probabilities by the values. The second group is half a tile behind the first: while one group is
// in its scores and its softmax, the other one multiplies values. A step is half a tile. Each two
// steps, all warps meet at a barrier, after which the slot of a tile that both groups have finished
// is filled again. If there is only one group, another CTA on the SM fills its gaps.
template <typename Tr, typename Shared, typename Loader>
__device__ __forceinline__ void attend_tiles(Shared& shared, Loader& loader, int tiles, int group,
                                             float scale, float margin, PortableRow& row,
                                             float (&o)[Tr::kRows / 16][Tr::kOutputs]) {
  constexpr bool kUnpacks = Loader::kUnpacks;
  constexpr int kAhead = Tr::kSlots - Tr::kGroups;  // tiles whose copies are in flight
  static_assert(kAhead >= 1);
  if constexpr (kUnpacks) {
    loader.load();
    cp_async_wait();
    if (tiles > 0) loader.unpack();
    loader.load();
  } else {
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) loader.load();
  }
  clear_fragments(o);
  const uint32_t probabilities = smem_address(shared.probabilities[group]);
  // This warp's operands. Those in key tiles are relative to the tile. Computing them in each step
  // would delay its products.
  const ScoreOperands<Tr> scored(smem_address(shared.q), 0, group);
  const Operand<Side::kA, false, Tr::kRows> weights(probabilities, 0, 0);
  const Operand<Side::kB, true, Tr::kKeys, Tr::kOutputSlice> values(
      Tr::kFirstValueBlock * (Tr::kKeys * 128), 0, group_warp() * (Tr::kE / 4));
#pragma unroll 1
  for (int step = 0; step < 2 * tiles + Tr::kGroups - 1; ++step) {
    if (step % 2 == 0) {
      cp_async_wait_group<kUnpacks ? 0 : kAhead - 1>();
      if (step < 2 * tiles) loader.landed(step / 2);
      __syncthreads();
      if constexpr (kUnpacks) {
        if (step / 2 + 1 < tiles) loader.unpack();
      }
      loader.load();
    }
    const int own = step - group;
    if (own < 0 || own >= 2 * tiles) continue;
    const int tile = own / 2, slot = tile % Tr::kSlots;
    const uint32_t keys = smem_address(shared.keys[slot]);
    if (own % 2 == 0) {
      float* const scores = shared.scores[group];
      multiply_scores<Tr>(scored.q, scored.keys.moved(keys), scores);
      sync_group();
      float s[Tr::kLaneKeys];
      load_scores<Tr>(scores, shared.valid[slot], s);
      loader.adjust(tile, s);
      const float factor = row.softmax<Tr>(s, scale, margin);
      loader.weigh(tile, s);
      store_probabilities<Tr>(probabilities, s);
      if (lane_index() < Tr::kWarpRows) shared.factor[group][lane_row<Tr>()] = factor;
      sync_group();
    } else {
      const float* const factors = shared.factor[group] + lane_index() / 4;
#pragma unroll
      for (int m = 0; m < Tr::kRows / 16; ++m) {
        const float factor[2] = {factors[m * 16], factors[m * 16 + 8]};
        if (__any_sync(~0u, (factor[0] != 1.f) | (factor[1] != 1.f))) {
#pragma unroll
          for (int i = 0; i < Tr::kOutputs; ++i) o[m][i] *= factor[i / 2 % 2];
        }
      }
      multiply_tiles<DType::kBF16, Tr::kKeys / 16>(o, weights, values.moved(keys));
    }
  }
  sync_group();
}

}  // namespace jax_dsa::mla
