// What the warpgroups of the masked attention forward kernel share: tile sizes, work items, shared
// memory. See fwd.cuh.
#pragma once

#include <cstdint>

#include "common/limits.h"
#include "common/ring.cuh"
#include "common/tile.cuh"
#include "masked_attention/bias.cuh"
#include "masked_attention/mask.cuh"

namespace jax_dsa::masked_attention {

inline constexpr int kStageBytes = 1024;  // a warp's way out

// How many steps of 16 dims of its queries a warpgroup keeps in registers: each saves the tensor
// cores 2 KiB of shared memory a tile, and takes four registers a thread.
constexpr int held_steps(int dim, int value_dim, bool bias) {
  return dim + value_dim <= 256 ? dim / 16 : value_dim > 128 && !bias ? 4 : 0;
}

// kD, kE: the most dims of queries and keys, and of values. kGeneral: scores are softcapped, or
// their scale is not positive. kTurns: the warpgroups take turns with their products. kBias: scores
// have biases; they are then general.
template <DType kType_, int kD_, int kE_, bool kGeneral_, bool kBias_ = false,
          int kHeldSteps_ = held_steps(kD_, kE_, kBias_), bool kTurns_ = true>
struct FwdTraits {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kBias = kBias_;
  static_assert(kGeneral || !kBias);
  static constexpr int kKeys = kE > 128 || kBias ? 64 : 128;  // of a tile
  static constexpr int kDBlocks = ceil_div(kD, 64), kEBlocks = ceil_div(kE, 64);
  static constexpr int kQBlockBytes = kQueryTile * 128, kKeyBlockBytes = kKeys * 128;
  static constexpr int kStages = kD + kE <= 128 ? 4 : kBias && kE <= 128 ? 3 : 2;
  static constexpr int kBiasBuffers = !kBias ? 0 : kE > 128 ? 1 : kStages;
  // Tiles are listed, and have their bits made, so many at a time: two more than are copied, so
  // that whoever makes bits is ahead of the products; in all an even number, since two warps take
  // turns.
  static constexpr int kListed = ceil_div(kStages + 2, 2) * 2;
  static constexpr int kHeldSteps = kHeldSteps_;
  static constexpr bool kTurns = kTurns_;
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static_assert(registers_fit(1, 2, kConsumerRegisters, kProducerRegisters));
};

// 0 is __syncthreads.
enum NamedBarrier {
  kTurn = 1,  // warpgroup kTurn + i may issue its products
};

inline constexpr int kConsumerWarps = 8;
inline constexpr int kBuilderWarps = 2;  // they make bits

// What a block does at a time: the queries from `query` on of one head.
struct Item {
  int batch, head, query;
  bool over;  // there are no more items
  bool some;  // its queries see any tile
};

// A tile of an item's keys; an item that sees none has one, too, and so has the end.
struct Listing {
  Item item;
  int map;  // its number
  int key;  // the first
  bool partial;
  bool first, last;  // of its item
};

// What lies in a stage of the ring.
struct Stage {
  int listing;      // its place
  uint32_t parity;  // of its listing's barriers
  bool partial, last;
};

template <typename Tr>
struct alignas(1024) Shared {
  uint8_t q[Tr::kDBlocks][Tr::kQBlockBytes];
  uint8_t k[Tr::kStages][Tr::kDBlocks][Tr::kKeyBlockBytes];
  uint8_t v[Tr::kStages][Tr::kEBlocks][Tr::kKeyBlockBytes];
  uint8_t out[8][kStageBytes];
  [[no_unique_address]] BiasBuffers<Tr::kBiasBuffers, kQueryTile, Tr::kKeys / 64> bias;
  // Of partial tiles that are listed; and a bit for each key that no query sees.
  uint32_t bits[Tr::kListed][kQueryTile][Tr::kKeys / 32];
  uint32_t unseen[Tr::kListed][Tr::kKeys / 32];
  Listing listing[Tr::kListed];
  Stage stage[Tr::kStages];
  Item item;
  uint64_t q_full, q_free;
  // A tile's listing; its bits; that both are done with.
  uint64_t listed[Tr::kListed], built[Tr::kListed], unlisted[Tr::kListed];
  // A stage's keys; its values, and that unseen ones are zero.
  uint64_t k_full[Tr::kStages], k_free[Tr::kStages];
  uint64_t v_full[Tr::kStages], v_clean[Tr::kStages], v_free[Tr::kStages];
};

// How the items are numbered: heads come in sections whose keys and values the L2 holds; within
// a section, the last queries of all its heads come first, as they see most where masks are causal.
struct Work {
  int64_t items;
  int query_tiles;
  int section;  // heads of a section

  Work(const MaskedAttentionFwdParams& p, int64_t l2_bytes) {
    query_tiles = static_cast<int>(ceil_div(p.queries, int64_t{kQueryTile}));
    const int64_t heads = p.batch * p.heads, per_group = p.heads / p.groups;
    items = heads * query_tiles;
    const int64_t group_bytes = p.keys * (p.dim + p.value_dim) * 2;
    const int64_t groups = l2_bytes / 2 / (group_bytes > 0 ? group_bytes : 1);
    const int64_t fit = (groups > 0 ? groups : 1) * per_group;
    section = static_cast<int>(fit < heads ? fit : heads);
  }

  __device__ Item item(const MaskedAttentionFwdParams& p, unsigned number) const {
    if (number >= items) return {0, 0, 0, true, false};
    const int64_t before = int64_t{number} / (int64_t{section} * query_tiles) * section;
    const int heads = static_cast<int>(min(int64_t{section}, p.batch * p.heads - before));
    const int rest = static_cast<int>(number - before * query_tiles), tile = rest / heads;
    const int64_t head = before + (rest - tile * heads), batch = head / p.heads;
    return {static_cast<int>(batch), static_cast<int>(head - batch * p.heads),
            (query_tiles - 1 - tile) * kQueryTile, false, false};
  }
};

}  // namespace jax_dsa::masked_attention
