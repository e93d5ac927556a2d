// What the decode kernels share: the launch parameters, the shared-memory layout and the row that a
// CTA works on. decode.cuh describes the algorithm.
#pragma once

#include "htree/attend.cuh"
#include "htree/frequencies.h"

namespace jax_dsa::htree {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = kDecodeWarps * 32;
inline constexpr int kSamples = 64, kBins = 256;
// Candidates of the boundary bin that are ranked by pairwise comparisons; see decode_select.cuh.
inline constexpr int kMaxBoundary = 1024;

struct DecodePlan {
  Plan plan;  // its query chunk is not used
  const uint8_t* k;
  const uint8_t* v;
  int64_t nodes;                        // per batch entry
  int64_t first_node[kHTreeMaxLayers];  // of each layer
  Frequencies frequencies;
  int64_t rows;         // (batch entry, KV head group, query)
  int splits;           // CTAs per row
  int width;            // r K, candidates per layer below the top one
  int words;            // 32-bit words for one bit per candidate
  bool few_tiles;       // whether every warp gets only a few key tiles
  bool overlaps;        // whether the warps' outputs overwrite queries and tables
  float* importance;    // [2, rows, width], by ordinal; layers alternate between the two
  int32_t* lists;       // [layers - 1, rows, K]: nodes selected in layers 1, 2, ...
  uint32_t* bits;       // [layers - 1, rows, words]: ordinals selected
  float* outputs;       // [rows, splits, padded heads, D]: not normalized
  float2* max_and_sum;  // [rows, splits, padded heads]: running max, sum
};

// Dynamic shared memory holds this struct, then Q in 16-head tiles that are swizzled like the
// tree's blocks, then `Selection` and the importances. When the selection is done, the warps'
// outputs reuse their memory. On a GPU with little shared memory (DecodePlan::overlaps) they are
// written when all warps have attended, and reuse everything behind `max_and_sum`.
template <int kD, int kR, int kRows>
struct alignas(16) DecodeShared {
  static constexpr int kHalf = kD / 2, kTileBytes = kTileHeads * kD * 2;  // bytes per head tile
  static constexpr int kOutputStride = kD + 8;  // floats; 8 more avoid bank conflicts
  static constexpr int kWords = kR * static_cast<int>(kHTreeMaxTopK) / 32;
  struct alignas(16) Selection {
    float samples[kSamples];
    int bins[kBins];
    uint64_t boundary[kMaxBoundary];  // rank_key of each candidate in the boundary bin
    int parents[kHTreeMaxTopK];
    int boundary_bits[kWords];
    int warp_sums[2][kDecodeWarps];
    float low, lowest, high;  // samples
    int boundary_count;
  };
  float2 max_and_sum[kDecodeWarps][kTileHeads];
  float2 slots[kRows][kHalf + 8];  // cos and sin at `pair_slot`; 8 more avoid bank conflicts
  double frequencies[kHalf];
  float2 rotations[kDecodeWarps][kHalf];
  uint32_t bits[kWords];
  int list[kHTreeMaxTopK];

  __device__ uint8_t* queries(int head_tile) {
    return reinterpret_cast<uint8_t*>(this + 1) + head_tile * kTileBytes;
  }
  __device__ Selection& selection(int head_tiles) {
    return *reinterpret_cast<Selection*>(queries(head_tiles));
  }
  // Importances by ordinal, -inf for candidates that are never selected.
  __device__ float4* values(int head_tiles) {
    return reinterpret_cast<float4*>(&selection(head_tiles) + 1);
  }
  __device__ float* outputs(int head_tiles, bool overlaps) {
    return reinterpret_cast<float*>(overlaps ? reinterpret_cast<uint8_t*>(slots)
                                             : queries(head_tiles));
  }

  static constexpr int bytes(int head_tiles, int width, bool selects, bool attends,
                             bool overlaps = false) {
    const int selection =
        selects ? static_cast<int>(sizeof(Selection)) + ceil_div(width, 32) * 32 * 4 : 0;
    const int outputs = attends ? kDecodeWarps * kTileHeads * kOutputStride * 4 : 0;
    const int before = static_cast<int>(sizeof(DecodeShared)) + head_tiles * kTileBytes;
    if (overlaps) {
      return std::max(before + selection, static_cast<int>(sizeof(max_and_sum)) + outputs);
    }
    return before + std::max(selection, outputs);
  }
};

// The index at which the rotation of a pair of dimensions is stored. Lane i of a group of four
// needs pairs 8 i to 8 i + 7 of every 32. In this order the four lanes read two pairs each from
// adjacent addresses.
__device__ __forceinline__ int pair_slot(int pair) {
  return (pair / 32 * 4 + pair % 8 / 2) * 8 + pair / 8 % 4 * 2 + pair % 2;
}

__device__ __forceinline__ uint4 load_chunk(const uint8_t* from) {
  return __ldg(reinterpret_cast<const uint4*>(from));
}

// The row of a CTA, the query's position, and which split of the row's key tiles the CTA takes.
struct DecodeRow {
  int64_t row, token;
  int batch, group, split, position;

  __device__ explicit DecodeRow(const DecodePlan& x) {
    const HTreeFwdParams& p = x.plan.p;
    const auto splits = static_cast<uint32_t>(x.splits), groups = static_cast<uint32_t>(p.groups);
    const auto queries = static_cast<uint32_t>(p.queries);
    const uint32_t at = blockIdx.x / splits, bg = at / queries;
    row = at, split = static_cast<int>(blockIdx.x % splits);
    batch = static_cast<int>(bg / groups), group = static_cast<int>(bg % groups);
    token = batch * p.queries + at % queries;
    position = __ldg(p.positions + token);
  }
  // Offsets into `DecodePlan::lists` and `DecodePlan::bits`.
  __device__ int64_t list(const DecodePlan& x, int layer) const {
    return ((layer - 1) * x.rows + row) * x.plan.p.top_k;
  }
  __device__ int64_t bits(const DecodePlan& x, int layer) const {
    return ((layer - 1) * x.rows + row) * x.words;
  }
  __device__ float* importance(const DecodePlan& x, int layer) const {
    return x.importance + (layer % 2 * x.rows + row) * x.width;
  }
};

}  // namespace jax_dsa::htree
