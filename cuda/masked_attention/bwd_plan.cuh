// Traits, work tiles, tile scheduler, workspace and shared memory of the masked attention backward
// kernel. See bwd.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/device.h"
#include "common/limits.h"
#include "common/ring.cuh"
#include "common/tile.cuh"
#include "masked_attention/bias.cuh"
#include "masked_attention/bwd_bounds.cuh"
#include "masked_attention/scores.cuh"

namespace jax_dsa::masked_attention {

inline constexpr int kMaskThreads = 96;  // threads that build mask bits: three warps
// Queries of a step: the query tile of the main loop.
inline constexpr int kStepQueries = 64;
inline constexpr int kMinKeys = 32;  // minimum number of keys of a work tile

// kD: maximum dim of queries and keys. kE: maximum dim of values. kGeneral: scores have a bias or a
// softcap, or a scale that is not positive. kBias: scores have a bias, which implies kGeneral.
template <DType kType_, int kD_, int kE_, bool kGeneral_, bool kBias_ = false>
struct BwdTraits {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kBias = kBias_;
  static_assert(kGeneral || !kBias);
  static constexpr bool kWide = kD > 192 || kE > 128;
  static constexpr int kKeys = kWide ? 64 : 128;  // keys of a work tile
  static constexpr int kDBlocks = ceil_div(kD, 64), kEBlocks = ceil_div(kE, 64);
  static constexpr int kKeyBlockBytes = kKeys * 128, kQBlockBytes = kStepQueries * 128;
  static constexpr int kStages = 2;
  static constexpr int kBiasBuffers = !kBias ? 0 : kWide ? 1 : kStages;
  // Whether a third MMA warpgroup computes dQ; see bwd_dq.cuh.
  static constexpr bool kDqWarpgroup = !kGeneral && kD <= 128 && kE <= 128;
  // dQ of a step is computed in column slices of this width. The third warpgroup takes one after
  // the other. Without it there is one per MMA warpgroup, and a third slice, if any, is split over
  // keys: each warpgroup multiplies its own 64 keys.
  static constexpr int kDqSlices = kDqWarpgroup ? kD / 64 : kD > 128 && !kWide ? 3 : 2;
  static constexpr int kDqSliceColumns = kD / kDqSlices;
  // Threads whose parts of dQ are interleaved in the workspace; see dq_fragment.
  static constexpr int kDqPartThreads = kDqWarpgroup ? 32 : 128;
  // Whether the products QK^T and dO V^T run one after the other and P goes through shared memory,
  // because there are not enough registers to overlap them.
  static constexpr bool kSerialProducts = kD > 128 && !kWide;
  static constexpr int kThreads = kDqWarpgroup ? 512 : 384;
  static constexpr int kConsumerRegisters = !kDqWarpgroup ? 224 : kD <= 64 ? 192 : 208;
  static constexpr int kDqRegisters = kDqWarpgroup ? 64 : 0;
  static constexpr int kProducerRegisters = kDqWarpgroup && kD > 64 ? 32 : 56;
  static_assert(registers_fit(1, 2, kConsumerRegisters, kProducerRegisters, kDqRegisters));
};

// Barrier 0 is __syncthreads.
enum BwdNamedBarrier {
  kGradients = 1,  // dS of both warpgroups is in shared memory
  // Only for dims above 192:
  kProbabilities = 2,  // P of warpgroup 0 is in shared memory
  kOwnGradients = 3,   // all threads of warpgroup 1 have written their dS
  kDsRead = 4,         // with a softcap: warpgroup 1 has finished reading the previous step's dS
};

// A work tile: 128 (or 64) keys of one KV head, from `key` on.
struct BwdWorkTile {
  int batch, group, key;
  bool done;           // there are no more work tiles
  bool nonempty;       // at least one query tile sees its keys
  uint32_t unseen[4];  // see KeyBounds
};

// Describes the step in a pipeline stage: 64 queries of one head.
struct BwdStage {
  int head, query;
  bool partial;
  bool last;  // the last step of its work tile
  // If deterministic: the number of work tiles that add to dQ of these queries before this one.
  uint32_t earlier_adds;
  int64_t step;  // index of the step among the steps of all heads
};

// Scores of a step with any of these flags need more work.
enum StepFlags { kPartial = 1, kHugeRows = 2 };

// Describes a buffer of dS for the warpgroup that computes dQ; see BwdStage.
struct DsDescription {
  int64_t step;
  uint32_t earlier_adds;
  bool last;
};

inline constexpr int kDsBuffers = 2;
inline constexpr int kMaxDqSlices = 3;  // maximum number of column slices of dQ

template <typename Tr>
struct alignas(1024) BwdShared {
  uint8_t k[Tr::kDBlocks][Tr::kKeyBlockBytes];
  uint8_t v[Tr::kEBlocks][Tr::kKeyBlockBytes];
  uint8_t q[Tr::kStages][Tr::kDBlocks][Tr::kQBlockBytes];
  uint8_t dout[Tr::kStages][Tr::kEBlocks][Tr::kQBlockBytes];
  uint8_t ds[Tr::kWide ? 1 : kDsBuffers][Tr::kKeys * kStepQueries * 2];  // [keys, queries]
  // P, with the layout of ds, where it goes through shared memory.
  uint8_t p[Tr::kSerialProducts || Tr::kWide ? Tr::kKeys * kStepQueries * 2 : 1024];
  uint8_t out[8][1024];
  [[no_unique_address]] BiasBuffers<Tr::kBiasBuffers, kStepQueries, Tr::kKeys / 64> bias;
  // With a dQ warpgroup: the accumulators of each slice and warp, on their way to global memory.
  uint8_t dq[Tr::kDqWarpgroup ? Tr::kDqSlices : 1][4][Tr::kDqWarpgroup ? kStepQueries * 64 : 32];
  float lse[Tr::kStages][kStepQueries];
  float delta[Tr::kStages][kStepQueries];
  uint32_t bits[Tr::kStages][Tr::kKeys][kStepQueries / 32];  // mask bits of partial tiles
  BwdStage stage[Tr::kStages];
  uint8_t flags[Tr::kStages];  // StepFlags; written by the mask warps
  uint32_t* pending_add[8];    // per warp: the counter of its last addition, not yet incremented
  BwdWorkTile work_tile;
  uint64_t work_tile_full, kv_full, kv_cleared, kv_free;
  // Barriers of a stage: it is described; Q, lse and delta are loaded; dO is loaded; mask bits are
  // built and fully masked rows are zero; the stage is free.
  uint64_t stage_described[Tr::kStages], q_full[Tr::kStages], dout_full[Tr::kStages];
  uint64_t step_ready[Tr::kStages], free[Tr::kStages];
  // With a dQ warpgroup: dS of all keys is in the buffer; its product is done.
  uint64_t ds_full[kDsBuffers], ds_free[kDsBuffers];
  DsDescription ds_description[kDsBuffers];
};

// Maps the tile counter to work tiles. KV heads are processed in sections. The queries of a section
// should fit in the L2 cache, but a section has at least enough KV heads to fill all SMs, because a
// few work tiles left at the end leave SMs idle. Within a section, the first keys of all KV heads
// come first, because with a causal mask most queries see them. `order` replaces this order if the
// weights of the key tiles are known.
struct BwdTileScheduler {
  int64_t work_tiles;
  int64_t steps;  // steps of 64 queries per head
  int key_tiles;
  int keys;  // keys per tile
  int64_t groups, sections;
  const int* order = nullptr;  // key tiles of each KV head, the heaviest first; or null

  BwdTileScheduler(const MaskedAttentionBwdParams& p, int keys_per_tile, const Device& device) {
    keys = keys_per_tile;
    key_tiles = static_cast<int>(ceil_div(p.keys, int64_t{keys}));
    steps = ceil_div(p.queries, int64_t{kStepQueries});
    const int64_t heads_per_group = p.heads / p.groups;
    groups = p.batch * p.groups;
    work_tiles = groups * key_tiles;
    // Bytes of q and dout in 16 bits, and of dq in float32.
    const int64_t group_bytes = heads_per_group * p.queries * (p.dim * 6 + p.value_dim * 2);
    const int64_t fit = device.l2_bytes / 2 / std::max(group_bytes, int64_t{1});
    // Ordered sums wait less if fewer key tiles of a KV head are in progress.
    const int64_t needed = device.num_sms / (p.deterministic ? 8 : std::max(key_tiles, 1));
    sections = std::max(groups / std::max(std::max(fit, needed), int64_t{1}), int64_t{1});
  }

  __device__ BwdWorkTile work_tile(const MaskedAttentionBwdParams& p, unsigned index) const {
    if (index >= work_tiles) return {.done = true};
    const int64_t section = ((index / key_tiles + 1) * sections - 1) / groups;
    const int64_t first = section * groups / sections;
    const int count = static_cast<int>((section + 1) * groups / sections - first);
    const int rest = static_cast<int>(index - first * key_tiles), place = rest / count;
    const int64_t group = first + (rest - place * count), batch = group / p.groups;
    const int tile = order ? order[group * key_tiles + place] : place;
    return {static_cast<int>(batch), static_cast<int>(group - batch * p.groups), tile * keys};
  }
};

// Returns the factor of lse in the workspace. With general scores and in bwd_dq.cuh, lse is
// subtracted from the argument of exp2; else from unscaled scores.
template <typename Tr>
float lse_factor(const MaskedAttentionBwdParams& p) {
  return Tr::kGeneral || Tr::kDqWarpgroup ? kLog2E : 1.f / p.scale;
}

// Returns how many boxes of 64 keys cover `keys` when rounded up to whole tiles of 128 keys.
__host__ __device__ inline int64_t bias_key_boxes(int64_t keys) {
  return ceil_div(keys, int64_t{128}) * 2;
}

// Returns whether each bias belongs to a single score. Its gradient is then stored directly.
inline bool bias_is_unshared(const MaskedAttentionBwdParams& p) {
  return p.bias.queries > 1 && p.bias.batch == p.batch && p.bias.heads == p.heads;
}

// Returns how many float32 sums the bias gradients need: one per key if all queries share a row,
// otherwise tiles in the layout of the accumulators.
inline int64_t num_bias_sums(const MaskedAttentionBwdParams& p) {
  if (!p.bias.x || bias_is_unshared(p)) return 0;
  const int64_t rows = int64_t{p.bias.batch} * p.bias.heads;
  if (p.bias.queries == 1) return rows * p.keys;
  return rows * ceil_div(p.queries, int64_t{kStepQueries}) * bias_key_boxes(p.keys) *
         (kStepQueries * 64);
}

// The arrays in the workspace. Arrays with an entry per query are [batch, heads, steps, 64, ...]
// and include entries for the queries beyond the last one.
struct BwdWorkspace {
  unsigned* tile_counter;  // alone in its 16 bytes
  QueryBounds* queries;
  SegmentBounds* segments;
  KeyBounds* keys;  // [batch, groups, key tiles]
  int* order;       // [batch, groups, key tiles]; see BwdTileScheduler
  // [.., 64]; see lse_factor; +inf for fully masked or missing queries, 0 for huge rows
  float* lse;
  HugeRow* huge_rows;      // [.., 64]; written only for steps that have a huge row
  bool* huge;              // [..]; whether the step has a huge row
  float* delta;            // [.., 64]; 0 for fully masked or missing queries
  uint64_t* fully_masked;  // [..]; one bit per query, set if it is fully masked
  // [.., kMaxDqSlices, 4]; if deterministic: the number of work tiles that have added, per warp.
  uint32_t* add_counts;
  float* dq;     // [.., kD * 64], in the layout of the accumulators; see add_dq
  float* dbias;  // num_bias_sums floats; null if there are none
  int64_t bytes;

  BwdWorkspace(const MaskedAttentionBwdParams& p, int template_dim) {
    char* const base = static_cast<char*>(p.workspace);
    int64_t at = 0;
    const auto take = [&](int64_t size) {
      char* const array = base + at;
      at += ceil_div(size, int64_t{128}) * 128;
      return array;
    };
    const int64_t steps = p.batch * p.heads * ceil_div(p.queries, int64_t{kStepQueries});
    tile_counter = reinterpret_cast<unsigned*>(take(16));
    queries = reinterpret_cast<QueryBounds*>(take(bounded_query_tiles(p) * sizeof(QueryBounds)));
    segments = reinterpret_cast<SegmentBounds*>(take(bounded_key_tiles(p) * sizeof(SegmentBounds)));
    const int64_t bounded = has_query_bounds(p.mask) ? p.batch * p.groups : 0;
    const int64_t key_tiles = bounded * ceil_div(p.keys, int64_t{kMinKeys});
    keys = reinterpret_cast<KeyBounds*>(take(key_tiles * sizeof(KeyBounds)));
    order = reinterpret_cast<int*>(take(key_tiles * sizeof(int)));
    lse = reinterpret_cast<float*>(take(steps * kStepQueries * 4));
    huge_rows = reinterpret_cast<HugeRow*>(take(steps * kStepQueries * sizeof(HugeRow)));
    huge = reinterpret_cast<bool*>(take(steps));
    delta = reinterpret_cast<float*>(take(steps * kStepQueries * 4));
    fully_masked = reinterpret_cast<uint64_t*>(take(steps * 8));
    add_counts = reinterpret_cast<uint32_t*>(take(steps * kMaxDqSlices * 4 * 4));
    dq = reinterpret_cast<float*>(take(steps * kStepQueries * template_dim * 4));
    const int64_t sums = num_bias_sums(p);
    float* const biases = reinterpret_cast<float*>(take(sums * 4));
    dbias = sums > 0 ? biases : nullptr;
    bytes = at;
  }
};

}  // namespace jax_dsa::masked_attention
