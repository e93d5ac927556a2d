// Traits, work tiles, tile scheduler and shared memory of the masked attention forward kernel. See
// fwd.cuh.
#pragma once

#include <cstdint>

#include "common/limits.h"
#include "common/ring.cuh"
#include "common/tile.cuh"
#include "masked_attention/bias.cuh"
#include "masked_attention/mask.cuh"
#include "masked_attention/scores.cuh"

namespace jax_dsa::masked_attention {

inline constexpr int kStagingBytes = 1024;  // bytes of a warp's staging buffer for outputs

// The MMA warpgroups of a kernel, which have 64 rows of a work tile each. One more warpgroup is the
// producer.
template <int kWarpgroups_>
struct MmaWarpgroups {
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kRows = 64 * kWarpgroups;  // of a work tile
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
};

// Returns how many MMA warpgroups fit. With 64 dims the exponentials take as long as the products.
// While one warpgroup of three issues its products, two compute exponentials.
constexpr int forward_warpgroups(int dim, int value_dim, bool bias) {
  return dim <= 64 && value_dim <= 64 && !bias ? 3 : 2;
}

// Returns how many 16-dim steps of Q a warpgroup keeps in registers. Each step saves 2 KiB of
// shared-memory reads per key tile and costs four registers per thread.
constexpr int q_register_steps(int dim, int value_dim, bool bias, int warpgroups) {
  if (warpgroups > 2) return 0;
  return dim + value_dim <= 256 ? dim / 16 : value_dim > 128 && !bias ? 4 : 0;
}

// A work tile: consecutive rows of one head, from `query` on.
struct WorkTile {
  int batch, head, query;
  bool done;      // there are no more work tiles
  bool nonempty;  // its queries see at least one key tile
};

// Where a thread's two rows of a work tile are in [batch, queries, heads].
struct RowPlace {
  int64_t first;
  int64_t second;  // relative to the first
  int rows_left;   // the first row exists if this is positive, the second one if it exceeds 8
};

// The rows of a work tile of masked attention: kRows consecutive queries. `row` is a thread's first
// row; its second one is eight rows below.
template <int kRows>
struct QueryRows {
  int row;

  __device__ QueryRows(const MaskedAttentionFwdParams&, int row) : row(row) {}
  template <int kScores>
  __device__ void mask(float (&s)[kScores], const uint32_t (*bits)[kScores / 16]) const {
    mask_scores(s, bits + row);
  }
  __device__ int head(const MaskedAttentionFwdParams&, const WorkTile& x, int) const {
    return x.head;
  }
  __device__ RowPlace place(const MaskedAttentionFwdParams& p, const WorkTile& x) const {
    const int64_t token = int64_t{x.batch} * p.queries + x.query + row;
    return {token * p.heads + x.head, int64_t{8} * p.heads,
            static_cast<int>(min(p.queries - x.query, int64_t{kRows})) - row};
  }
};

struct NoExtra {};

// kD: maximum dim of queries and keys. kE: maximum dim of values. kGeneral: scores have a bias or a
// softcap, or a scale that is not positive. kBias: scores have a bias, which implies kGeneral.
// kUsePingPong: the MMA warpgroups take turns in issuing their MMAs.
template <DType kType_, int kD_, int kE_, bool kGeneral_, bool kBias_ = false,
          int kWarpgroups_ = forward_warpgroups(kD_, kE_, kBias_),
          int kQRegisterSteps_ = q_register_steps(kD_, kE_, kBias_, kWarpgroups_),
          bool kUsePingPong_ = true>
struct FwdTraits : MmaWarpgroups<kWarpgroups_> {
  using Rows = QueryRows<64 * kWarpgroups_>;
  using Extra = NoExtra;  // what the kernel has in shared memory beside `Shared`
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kBias = kBias_;
  static_assert(kGeneral || !kBias);
  static constexpr int kKeys = kE > 128 || kBias ? 64 : 128;  // keys per tile
  static constexpr int kDBlocks = ceil_div(kD, 64), kEBlocks = ceil_div(kE, 64);
  static constexpr int kQBlockBytes = 64 * kWarpgroups_ * 128, kKeyBlockBytes = kKeys * 128;
  static constexpr int kStages = kD + kE <= 128 ? 4 : kBias && kE <= 128 ? 3 : 2;
  static constexpr int kBiasBuffers = !kBias ? 0 : kE > 128 ? 1 : kStages;
  // Number of entries of the tile queue. It exceeds the number of stages by two, so that the mask
  // bits are built ahead of the MMA. It is even because two mask warps alternate.
  static constexpr int kQueued = ceil_div(kStages + 2, 2) * 2;
  static constexpr int kQRegisterSteps = kQRegisterSteps_;
  static constexpr bool kUsePingPong = kUsePingPong_;
  static constexpr int kConsumerRegisters = kWarpgroups_ > 2 ? 160 : 224;
  static constexpr int kProducerRegisters = kWarpgroups_ > 2 ? 32 : 56;
  static_assert(registers_fit(1, kWarpgroups_, kConsumerRegisters, kProducerRegisters));
};

// Barrier 0 is __syncthreads.
enum NamedBarrier {
  kPingPong = 1,  // kPingPong + i: warpgroup i may issue its MMAs
};

inline constexpr int kMaskWarps = 2;  // warps that build mask bits

// A key tile of a work tile, as an entry of the tile queue. A work tile without visible keys also
// has one entry, and so has the end of the work.
struct QueuedTile {
  WorkTile work_tile;
  int map;  // index of the map of its head
  int key;  // first key of the tile
  bool partial;
  bool first, last;  // whether this is the first or last key tile of its work tile
};

// Describes the key tile in a stage of the K/V pipeline.
struct Stage {
  int queue_slot;   // slot of the tile in the tile queue
  uint32_t parity;  // parity of the barriers of that slot
  bool partial, last;
};

template <typename Tr>
struct alignas(1024) Shared {
  uint8_t q[Tr::kDBlocks][Tr::kQBlockBytes];
  uint8_t k[Tr::kStages][Tr::kDBlocks][Tr::kKeyBlockBytes];
  uint8_t v[Tr::kStages][Tr::kEBlocks][Tr::kKeyBlockBytes];
  uint8_t out[Tr::kConsumerWarps][kStagingBytes];
  [[no_unique_address]] BiasBuffers<Tr::kBiasBuffers, Tr::kRows, Tr::kKeys / 64> bias;
  // Mask bits of the partial tiles in the queue, and one bit per key that no query of the tile
  // sees.
  uint32_t bits[Tr::kQueued][Tr::kRows][Tr::kKeys / 32];
  uint32_t unseen[Tr::kQueued][Tr::kKeys / 32];
  QueuedTile queue[Tr::kQueued];
  Stage stage[Tr::kStages];
  WorkTile work_tile;
  uint64_t q_full, q_free;
  // Barriers of a queue slot: its tile is described; its mask bits are built; all readers are done
  // with it.
  uint64_t tile_queued[Tr::kQueued], bits_built[Tr::kQueued], tile_released[Tr::kQueued];
  // Barriers of a stage: K is loaded; K is free; V is loaded; rows of V that no query sees are
  // zero; V is free.
  uint64_t k_full[Tr::kStages], k_free[Tr::kStages];
  uint64_t v_full[Tr::kStages], cleared[Tr::kStages], v_free[Tr::kStages];
  // A member and not a derived struct, whose layout in device code would not be that of host code:
  // only host compilers place members in the padding at the end of a base.
  [[no_unique_address]] typename Tr::Extra extra;
};

// Initializes the mbarriers. One thread calls this. `full` arrivals announce K or V of a stage, and
// `readers` warps of the producer read a queue slot.
template <typename Tr>
__device__ void init_barriers(Shared<Tr>& shared, int full = 1, int readers = 2) {
  mbarrier_init(&shared.q_full, 1);
  mbarrier_init(&shared.q_free, Tr::kConsumerWarps);
  for (int i = 0; i < Tr::kQueued; ++i) {
    mbarrier_init(&shared.tile_queued[i], 1);
    mbarrier_init(&shared.bits_built[i], 1);
    mbarrier_init(&shared.tile_released[i], Tr::kConsumerWarps + readers);
  }
  for (int i = 0; i < Tr::kStages; ++i) {
    mbarrier_init(&shared.k_full[i], full);
    mbarrier_init(&shared.k_free[i], Tr::kConsumerWarps);
    mbarrier_init(&shared.v_full[i], full);
    mbarrier_init(&shared.cleared[i], 1);
    mbarrier_init(&shared.v_free[i], Tr::kConsumerWarps);
  }
  if constexpr (Tr::kBias) {
    for (int i = 0; i < Tr::kBiasBuffers; ++i) {
      mbarrier_init(&shared.bias.full[i], 1);
      mbarrier_init(&shared.bias.free[i], Tr::kConsumerWarps);
    }
  }
}

// Maps the tile counter to work tiles. Heads are processed in sections whose K and V fit in half of
// the L2 cache. Within a section, the last queries of all heads come first, because with a causal
// mask they see the most keys.
struct TileScheduler {
  int64_t work_tiles;
  int64_t heads;  // of all batch entries together
  int heads_per_batch;
  int query_tiles;
  int tile_queries;  // queries of a work tile
  int section;       // heads per section

  // Every batch entry has `heads_per_batch` heads, which share p.groups KV heads.
  template <typename Params>
  TileScheduler(const Params& p, int heads_per_batch, int tile_queries, int64_t l2_bytes)
      : heads(p.batch * heads_per_batch),
        heads_per_batch(heads_per_batch),
        query_tiles(static_cast<int>(ceil_div(p.queries, int64_t{tile_queries}))),
        tile_queries(tile_queries) {
    work_tiles = heads * query_tiles;
    const int64_t group_bytes = p.keys * (p.dim + p.value_dim) * 2;
    const int64_t groups = l2_bytes / 2 / (group_bytes > 0 ? group_bytes : 1);
    const int64_t fit = (groups > 0 ? groups : 1) * (heads_per_batch / p.groups);
    section = static_cast<int>(fit < heads ? fit : heads);
  }

  __device__ WorkTile work_tile(unsigned index) const {
    if (index >= work_tiles) return {0, 0, 0, true, false};
    const int64_t before = int64_t{index} / (int64_t{section} * query_tiles) * section;
    const int in_section = static_cast<int>(min(int64_t{section}, heads - before));
    const int rest = static_cast<int>(index - before * query_tiles), tile = rest / in_section;
    const int64_t head = before + (rest - tile * in_section), batch = head / heads_per_batch;
    return {static_cast<int>(batch), static_cast<int>(head - batch * heads_per_batch),
            (query_tiles - 1 - tile) * tile_queries, false, false};
  }
};

}  // namespace jax_dsa::masked_attention
