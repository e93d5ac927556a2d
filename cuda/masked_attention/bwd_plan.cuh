// What the warpgroups of the masked attention backward kernel share: tile sizes, work items, the
// workspace, shared memory. See bwd.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/device.h"
#include "common/limits.h"
#include "common/ring.cuh"
#include "common/tile.cuh"
#include "masked_attention/bias.cuh"
#include "masked_attention/bwd_bounds.cuh"

namespace jax_dsa::masked_attention {

inline constexpr int kBuilders = 96;  // threads that make bits: three warps
inline constexpr int kStepQueries = 64;
inline constexpr int kLeastKeys = 64;  // of an item

// kD, kE: the most dims of queries and keys, and of values. kGeneral: scores are softcapped, or
// their scale is not positive. kBias: scores have biases; they are then general.
template <DType kType_, int kD_, int kE_, bool kGeneral_, bool kBias_ = false>
struct BwdTraits {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kBias = kBias_;
  static_assert(kGeneral || !kBias);
  static constexpr bool kWide = kD > 192 || kE > 128;
  static constexpr int kKeys = kWide ? 64 : 128;  // of an item
  static constexpr int kDBlocks = ceil_div(kD, 64), kEBlocks = ceil_div(kE, 64);
  static constexpr int kKeyBlockBytes = kKeys * 128, kQBlockBytes = kStepQueries * 128;
  static constexpr int kStages = 2;
  static constexpr int kBiasBuffers = !kBias ? 0 : kWide ? 1 : kStages;
  // dq is made in parts of so many columns: one a warpgroup, and a third whose sums over keys the
  // warpgroups share.
  static constexpr int kParts = kD > 128 && !kWide ? 3 : 2, kPartColumns = kD / kParts;
  // Whether the products of scores and of dout with values follow each other, and probabilities go
  // through shared memory, for want of registers.
  static constexpr bool kInTurn = kD > 128 && !kWide;
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static_assert(registers_fit(1, 2, kConsumerRegisters, kProducerRegisters));
};

// 0 is __syncthreads.
enum BwdNamedBarrier {
  kGradients = 1,  // both warpgroups' gradients of scores are in shared memory
  // Of dims beyond 192:
  kProbabilities = 2,  // the first warpgroup's are in shared memory
  kOwnGradients = 3,   // all threads of the second have written theirs
};

// What a block does at a time: 128 keys of one group.
struct BwdItem {
  int batch, group, key;
  bool over;           // there are no more items
  bool some;           // any query sees its keys
  uint32_t unseen[4];  // see KeyBounds
};

// What lies in a stage of the ring: 64 queries of one head.
struct BwdStage {
  int head, query;
  bool partial;
  bool last;      // of its item
  uint32_t turn;  // if deterministic: how many items add to dq of these queries before this one
  int64_t step;   // its number among those of all heads
};

inline constexpr int kMostParts = 3;  // of dq

template <typename Tr>
struct alignas(1024) BwdShared {
  uint8_t k[Tr::kDBlocks][Tr::kKeyBlockBytes];
  uint8_t v[Tr::kEBlocks][Tr::kKeyBlockBytes];
  uint8_t q[Tr::kStages][Tr::kDBlocks][Tr::kQBlockBytes];
  uint8_t dout[Tr::kStages][Tr::kEBlocks][Tr::kQBlockBytes];
  uint8_t ds[Tr::kWide ? 1 : Tr::kStages][Tr::kKeys * kStepQueries * 2];  // [keys, queries]
  // Probabilities, like ds, where they go through shared memory.
  uint8_t p[Tr::kInTurn || Tr::kWide ? Tr::kKeys * kStepQueries * 2 : 1024];
  uint8_t out[8][1024];
  [[no_unique_address]] BiasBuffers<Tr::kBiasBuffers, kStepQueries, Tr::kKeys / 64> bias;
  float lse[Tr::kStages][kStepQueries];
  float delta[Tr::kStages][kStepQueries];
  uint32_t bits[Tr::kStages][Tr::kKeys][kStepQueries / 32];  // of partial tiles
  BwdStage stage[Tr::kStages];
  uint32_t* adding[8];  // a warp's counter that is still to count what the warp has added
  BwdItem item;
  uint64_t item_full, kv_full, kv_clean, kv_free;
  // A stage's description; its arrays; its bits, and that unseeing queries are zero.
  uint64_t listed[Tr::kStages], q_full[Tr::kStages], dout_full[Tr::kStages];
  uint64_t checked[Tr::kStages], free[Tr::kStages];
};

// How the items are numbered: groups come in sections whose queries the L2 holds, or as many as the
// SMs need, since few items that are left for the end leave SMs idle. Within a
// section, the first keys of all its groups come first, as most queries see them where masks are
// causal; `order` tells better.
struct BwdWork {
  int64_t items;
  int64_t steps;  // of 64 queries, of a head
  int key_tiles;
  int keys;  // of a tile
  int64_t groups, sections;
  const int* order = nullptr;  // a group's tiles of keys, the heaviest first; or null

  BwdWork(const MaskedAttentionBwdParams& p, int keys_per_tile, const Device& device) {
    keys = keys_per_tile;
    key_tiles = static_cast<int>(ceil_div(p.keys, int64_t{keys}));
    steps = ceil_div(p.queries, int64_t{kStepQueries});
    const int64_t per_group = p.heads / p.groups;
    groups = p.batch * p.groups;
    items = groups * key_tiles;
    // q and dout, and dq in f32.
    const int64_t group_bytes = per_group * p.queries * (p.dim * 6 + p.value_dim * 2);
    const int64_t fit = device.l2_bytes / 2 / std::max(group_bytes, int64_t{1});
    // Where sums have an order, the fewer tiles of a group are under way, the less they wait.
    const int64_t needed = device.num_sms / (p.deterministic ? 8 : std::max(key_tiles, 1));
    sections = std::max(groups / std::max(std::max(fit, needed), int64_t{1}), int64_t{1});
  }

  __device__ BwdItem item(const MaskedAttentionBwdParams& p, unsigned number) const {
    if (number >= items) return {.over = true};
    const int64_t section = ((number / key_tiles + 1) * sections - 1) / groups;
    const int64_t first = section * groups / sections;
    const int count = static_cast<int>((section + 1) * groups / sections - first);
    const int rest = static_cast<int>(number - first * key_tiles), place = rest / count;
    const int64_t group = first + (rest - place * count), batch = group / p.groups;
    const int tile = order ? order[group * key_tiles + place] : place;
    return {static_cast<int>(batch), static_cast<int>(group - batch * p.groups), tile * keys};
  }
};

// What a logarithm is multiplied by to be subtracted from scores with biases, or from what exp2
// takes, if scores are general, or from unscaled scores.
template <typename Tr>
float lse_factor(const MaskedAttentionBwdParams& p) {
  return Tr::kBias ? 1.f : Tr::kGeneral ? kLog2E : 1.f / p.scale;
}

// Of 64 keys, with those that items of 128 keys have beyond the last.
__host__ __device__ inline int64_t bias_key_parts(int64_t keys) {
  return ceil_div(keys, int64_t{128}) * 2;
}

// Whether a bias is of one score alone, so that its gradient is stored at once.
inline bool bias_of_each_score(const MaskedAttentionBwdParams& p) {
  return p.bias.queries > 1 && p.bias.batch == p.batch && p.bias.heads == p.heads;
}

// How many floats are summed to the biases' gradients: for a row that all queries share, one for a
// key; else tiles as the accumulators lie.
inline int64_t bias_sums(const MaskedAttentionBwdParams& p) {
  if (!p.bias.x || bias_of_each_score(p)) return 0;
  const int64_t rows = int64_t{p.bias.batch} * p.bias.heads;
  if (p.bias.queries == 1) return rows * p.keys;
  return rows * ceil_div(p.queries, int64_t{kStepQueries}) * bias_key_parts(p.keys) *
         (kStepQueries * 64);
}

// The parts of the workspace. Arrays by query have a step's queries side by side, with those that
// are not there: [batch, heads, steps, ...].
struct BwdWorkspace {
  unsigned* ticket;  // 16 bytes of its own
  QueryBounds* queries;
  SegmentBounds* segments;
  KeyBounds* keys;  // [batch, groups, tiles of keys]
  int* order;       // likewise; see BwdWork
  float* lse;       // [.., 64]; see lse_factor; +inf for queries that see nothing or are not there
  float* delta;     // [.., 64]; 0 for those
  uint64_t* dead;   // [..]; a bit for each query that sees nothing
  uint32_t* added;  // [.., kMostParts, 4]: if deterministic, how many items have added, by warp
  float* dq;        // [.., kD * 64], as the accumulators lie; see add_dq
  float* dbias;     // bias_sums; null if there are none
  int64_t bytes;

  BwdWorkspace(const MaskedAttentionBwdParams& p, int template_dim) {
    char* const base = static_cast<char*>(p.workspace);
    int64_t at = 0;
    const auto take = [&](int64_t size) {
      char* const part = base + at;
      at += ceil_div(size, int64_t{128}) * 128;
      return part;
    };
    const int64_t steps = p.batch * p.heads * ceil_div(p.queries, int64_t{kStepQueries});
    ticket = reinterpret_cast<unsigned*>(take(16));
    queries = reinterpret_cast<QueryBounds*>(take(bounded_query_tiles(p) * sizeof(QueryBounds)));
    segments = reinterpret_cast<SegmentBounds*>(take(bounded_key_tiles(p) * sizeof(SegmentBounds)));
    const int64_t bounded = has_query_bounds(p.mask) ? p.batch * p.groups : 0;
    const int64_t key_tiles = bounded * ceil_div(p.keys, int64_t{kLeastKeys});
    keys = reinterpret_cast<KeyBounds*>(take(key_tiles * sizeof(KeyBounds)));
    order = reinterpret_cast<int*>(take(key_tiles * sizeof(int)));
    lse = reinterpret_cast<float*>(take(steps * kStepQueries * 4));
    delta = reinterpret_cast<float*>(take(steps * kStepQueries * 4));
    dead = reinterpret_cast<uint64_t*>(take(steps * 8));
    added = reinterpret_cast<uint32_t*>(take(steps * kMostParts * 4 * 4));
    dq = reinterpret_cast<float*>(take(steps * kStepQueries * template_dim * 4));
    const int64_t sums = bias_sums(p);
    float* const biases = reinterpret_cast<float*>(take(sums * 4));
    dbias = sums > 0 ? biases : nullptr;
    bytes = at;
  }
};

}  // namespace jax_dsa::masked_attention
