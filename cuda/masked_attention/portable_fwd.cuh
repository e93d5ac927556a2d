// Masked attention, forward pass, with instructions of sm_80. fwd.cuh has the mathematics.
//
// Tiling. A CTA takes one work tile: (batch, head, 128 or 64 queries). It has four warps, each with
// 32 or 16 of the queries, and loops over tiles of 32 to 128 keys. Key tiles that no query sees are
// skipped, and the scores of tiles that every query sees completely are not tested. Two CTAs share
// an SM, so that one computes its softmax while the other multiplies.
//
// Pipeline. Key and value tiles go through one ring of two or three buffers: K0, V0, K1, V1, ...
// Before each product, a thread waits for its own copies of the tile, passes a CTA barrier, and
// issues the copies of the tile that goes into the buffer which the barrier has freed.
//
// Registers. The output of 32 queries by 128 dims takes 128 registers per thread, the scores 64.
// Q is read from shared memory for every key tile: each fragment of K and V serves two tiles of 16
// rows. The probabilities stay in registers. The running maximum is that of fwd.cuh.
//
// Masks. Each warp builds the mask bits of its queries when it issues the copies of K. Rows of V
// that no query of the tile sees may hold NaN; their copies write zeros.
//
// Shared memory for D = E = 128 and 64 keys: Q 32 KiB, ring 3 x 16 KiB, mask bits 2 KiB.
#pragma once

#include <type_traits>

#include "common/mma_tile.cuh"
#include "masked_attention/fwd_plan.cuh"
#include "masked_attention/softmax.cuh"

namespace jax_dsa::masked_attention {

// kD, kE: see FwdTraits. kGeneral: see launch_kind. kRowTiles: tiles of 16 queries per warp. kKeys:
// keys of a tile. kSlots: buffers of the ring. kCtas: CTAs per SM.
template <DType kType_, int kD_, int kE_, bool kGeneral_, int kRowTiles_, int kKeys_, int kSlots_,
          int kCtas_ = 2>
struct PortableFwdTraits {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kRowTiles = kRowTiles_, kKeys = kKeys_, kSlots = kSlots_, kCtas = kCtas_;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kWarpQueries = kRowTiles * 16, kQueries = kWarps * kWarpQueries;
  static constexpr int kDBlocks = ceil_div(kD, 64), kEBlocks = ceil_div(kE, 64);
  static constexpr int kWords = kKeys / 32;  // mask words per query
  static constexpr int kBiasBuffers = kSlots - 1, kBiasBlocks = ceil_div(kKeys, 64);
  static_assert(kSlots == 2 || kSlots == 3);
  static_assert(kQueryTile % kQueries == 0 && kEBlocks <= kDBlocks);
};

// What a CTA knows of its work tile. It is in shared memory to save registers.
struct PortableWork {
  int batch, head, query, queries;  // `queries` exist
  int start, end;                   // range of the keys that may be visible; may be empty
  int64_t row;                      // of the first query in [batch, queries, heads]
  const uint16_t *k, *v, *bias;     // the first key, value and row of biases
  const QueryBounds* bounds;        // null if every query sees every key
  const SegmentBounds* segments;
  const int32_t* map;
  int64_t map_index;
};

template <int kQueries>
__device__ __forceinline__ PortableWork find_work(const MaskedAttentionFwdParams& p,
                                                  const TileScheduler& scheduler,
                                                  const Bounds& bounds) {
  const WorkTile x = scheduler.work_tile(blockIdx.x);
  const int keys = static_cast<int>(p.keys);
  PortableWork w = {};
  w.batch = x.batch, w.head = x.head, w.query = x.query;
  w.queries = static_cast<int>(min(p.queries - x.query, int64_t{kQueries}));
  w.row = (x.batch * p.queries + x.query) * p.heads + x.head;
  const int64_t key = x.batch * p.keys * p.groups + x.head / (p.heads / p.groups);
  w.k = static_cast<const uint16_t*>(p.k) + key * p.dim;
  w.v = static_cast<const uint16_t*>(p.v) + key * p.value_dim;
  const AttentionBias& b = p.bias;
  if (b.x) {
    const int64_t head =
        int64_t{b.batch == 1 ? 0 : x.batch} * b.heads + x.head / (p.heads / b.heads);
    w.bias = static_cast<const uint16_t*>(b.x) +
             (head * b.queries + (b.queries == 1 ? 0 : x.query)) * bias_row(p.keys);
  }
  w.start = 0, w.end = keys;
  if (bounds.queries) {
    w.bounds =
        bounds.queries + x.batch * ceil_div(p.queries, int64_t{kQueryTile}) + x.query / kQueryTile;
    w.start = max(w.bounds->min_start, 0), w.end = min(w.bounds->max_end, keys);
    if (w.start >= w.end) w.start = w.end = 0;
  }
  if (bounds.segments) w.segments = bounds.segments + x.batch * ceil_div(p.keys, int64_t{kKeyTile});
  w.map_index = mask_map_index(p.mask, x.batch, x.head, p.heads);
  w.map = map_tiles(p.mask, w.map_index);
  return w;
}

template <typename Tr>
struct alignas(128) PortableFwdShared {
  uint8_t q[Tr::kDBlocks][Tr::kQueries * 128];  // then the output
  uint8_t ring[Tr::kSlots][Tr::kDBlocks][Tr::kKeys * 128];
  uint8_t bias[Tr::kGeneral ? Tr::kBiasBuffers : 1]
              [Tr::kGeneral ? Tr::kBiasBlocks * Tr::kQueries * 128 : 16];
  // Mask bits of two partial tiles, and which keys the queries of each warp see.
  uint32_t bits[2][Tr::kQueries][Tr::kWords];
  uint32_t seen[2][Tr::kWarps][Tr::kWords];
  PortableWork work;
};

// A key tile in the pipeline: its first key, plus one if the tile is partial. Negative for none.
using PipelinedTile = int;
inline constexpr PipelinedTile kNoTile = -2;

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtas)
    portable_fwd_kernel(const __grid_constant__ MaskedAttentionFwdParams p,
                        const __grid_constant__ TileScheduler scheduler,
                        const __grid_constant__ Bounds bounds) {
  constexpr int kM = Tr::kRowTiles, kScores = Tr::kKeys / 2;
  constexpr DType kType = Tr::kType;
  auto& shared = dynamic_shared<PortableFwdShared<Tr>>();
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  const int warp_row = warp * Tr::kWarpQueries;
  const int keys = static_cast<int>(p.keys);
  PortableWork& work = shared.work;
  if (threadIdx.x == 0) work = find_work<Tr::kQueries>(p, scheduler, bounds);
  __syncthreads();

  // The walk over the visible key tiles. All warps take the same steps.
  TileWalk tiles(work.start / Tr::kKeys, ceil_div(work.end, Tr::kKeys), [&](int tile) {
    return classify_key_tile<Tr::kKeys>(p.mask, work.bounds, work.segments, work.map, keys, tile);
  });
  const auto next_tile = [&]() -> PipelinedTile {
    if (!tiles.has_tile()) return kNoTile;
    const PipelinedTile x = tiles.tile() * Tr::kKeys + tiles.partial();
    tiles.advance();
    return x;
  };

  // ---- copies
  const auto ring = [&](int slot) { return smem_address(shared.ring[slot]); };
  const auto k_stride = [&] { return int64_t{p.groups} * p.dim; };
  const auto v_stride = [&] { return int64_t{p.groups} * p.value_dim; };
  const auto build_bits = [&](int key, int buffer) {
    uint32_t bits[1][Tr::kWords];
    query_bits<Tr::kKeys>(p.mask, work.map_index, work.batch, work.query + warp_row, p.queries, key,
                          keys, bits);
#pragma unroll
    for (int w = 0; w < Tr::kWords; ++w) {
      if (Tr::kWarpQueries < 32 && lane >= Tr::kWarpQueries) bits[0][w] = 0;
      if (lane < Tr::kWarpQueries) shared.bits[buffer][warp_row + lane][w] = bits[0][w];
      const uint32_t seen = __reduce_or_sync(~0u, bits[0][w]);
      if (lane == 0) shared.seen[buffer][warp][w] = seen;
    }
    __syncwarp();
  };
  // Issue the copies of a key tile and its biases, or of its values. `buffer` is that of its bits.
  const auto load_keys = [&](PipelinedTile tile, int slot, int buffer) {
    if (tile >= 0) {
      const int key = tile & ~1;
      load_tile<Tr::kKeys, Tr::kDBlocks, Tr::kThreads>(ring(slot), work.k + key * k_stride(),
                                                       k_stride(), p.dim,
                                                       [&](int row) { return row < keys - key; });
      if (Tr::kGeneral && p.bias.x) {
        const int64_t width = bias_row(p.keys);
        load_tile<Tr::kQueries, Tr::kBiasBlocks, Tr::kThreads>(
            smem_address(shared.bias[buffer % Tr::kBiasBuffers]), work.bias + key,
            p.bias.queries == 1 ? 0 : width, static_cast<int>(min(width - key, int64_t{Tr::kKeys})),
            [&](int row) { return row < work.queries; });
      }
      if (tile & 1) build_bits(key, buffer);
    }
    cp_async_commit();
  };
  const auto load_values = [&](PipelinedTile tile, int slot, int buffer) {
    if (tile >= 0) {
      const int key = tile & ~1;
      uint32_t seen[Tr::kWords];
#pragma unroll
      for (int w = 0; w < Tr::kWords; ++w) {
        seen[w] = ~0u;
        if (tile & 1) {
          seen[w] = 0;
#pragma unroll
          for (int i = 0; i < Tr::kWarps; ++i) seen[w] |= shared.seen[buffer][i][w];
        }
      }
      load_tile<Tr::kKeys, Tr::kEBlocks, Tr::kThreads>(
          ring(slot), work.v + key * v_stride(), v_stride(), p.value_dim, [&](int row) {
            uint32_t word = seen[0];
#pragma unroll
            for (int w = 1; w < Tr::kWords; ++w) word = row / 32 == w ? seen[w] : word;
            return (word >> row % 32 & 1) && row < keys - key;
          });
    }
    cp_async_commit();
  };

  load_tile<Tr::kQueries, Tr::kDBlocks, Tr::kThreads>(
      smem_address(shared.q), static_cast<const uint16_t*>(p.q) + work.row * p.dim,
      int64_t{p.heads} * p.dim, p.dim, [&](int row) { return row < work.queries; });
  PipelinedTile tile = next_tile(), upcoming = kNoTile;
  const bool nonempty = tile >= 0;
  load_keys(tile, 0, 0);

  // ---- main loop
  const ScoreUnits<Tr::kGeneral> units(p.scale);
  float cap_inverse = 0.f;
  if constexpr (Tr::kGeneral) cap_inverse = p.softcap > 0.f ? 1.f / p.softcap : 0.f;
  const Operand<Side::kA, false, Tr::kQueries> q(smem_address(shared.q), warp_row, 0);
  float o[kM][Tr::kE / 2];
  clear_fragments(o);
  RowState rows[kM];
#pragma unroll
  for (int m = 0; m < kM; ++m) rows[m] = {{-INFINITY, -INFINITY}, -INFINITY, {0.f, 0.f}, false};

  int slot = 0, buffer = 0;  // the slot of the next tile to be read, and the buffer of its bits
  const auto free_slot = [&] { return slot == 0 ? Tr::kSlots - 1 : slot - 1; };
  const auto advance = [&] { slot = slot + 1 == Tr::kSlots ? 0 : slot + 1; };
  if constexpr (Tr::kSlots == 3) {
    __syncthreads();  // shared.seen is written
    load_values(tile, 1, 0);
  }
  for (; tile >= 0; tile = upcoming, buffer ^= 1) {
    cp_async_wait_group<Tr::kSlots - 2>();
    __syncthreads();
    if constexpr (Tr::kSlots == 3) {
      upcoming = next_tile();
      load_keys(upcoming, free_slot(), buffer ^ 1);
    } else {
      load_values(tile, free_slot(), buffer);
    }
    float s[kM][kScores];
    clear_fragments(s);
    multiply_tiles<kType, Tr::kD / 16>(s, q, Operand<Side::kB, false, Tr::kKeys>(ring(slot), 0, 0));
    advance();

    uint32_t probabilities[kM][Tr::kKeys / 16][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const int row = warp_row + m * 16;
      if constexpr (Tr::kGeneral) {
        if (p.bias.x) {
          const Operand<Side::kA, false, Tr::kQueries> bias(
              smem_address(shared.bias[buffer % Tr::kBiasBuffers]), row, 0);
          add_bias<kType>(s[m], p.scale, [&](int k, uint32_t (&x)[4]) { bias.load(0, k, x); });
        }
        cap_scores(s[m], p.bias.x ? 1.f : p.scale, p.softcap, cap_inverse);
      }
      if (tile & 1) mask_scores(s[m], shared.bits[buffer] + row + lane / 4);
      float factor[2];
      if (softmax(s[m], units, rows[m], factor)) {
#pragma unroll
        for (int i = 0; i < Tr::kE / 2; ++i) o[m][i] *= factor[i / 2 % 2];
      }
    }
    pack_fragments<kType>(s, probabilities);

    cp_async_wait_group<Tr::kSlots - 2>();
    __syncthreads();
    if constexpr (Tr::kSlots == 3) {
      load_values(upcoming, free_slot(), buffer ^ 1);
    } else {
      upcoming = next_tile();
      load_keys(upcoming, free_slot(), buffer ^ 1);
    }
    multiply_tiles<kType, Tr::kKeys / 16>(o, RegisterOperand<kM, Tr::kKeys / 16>{probabilities},
                                          Operand<Side::kB, true, Tr::kKeys>(ring(slot), 0, 0));
    advance();
  }

  // ---- results
  cp_async_wait();
  __syncthreads();  // a work tile without keys has not waited for its copies of Q
  const uint32_t out = smem_address(shared.q);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const int row = warp_row + m * 16 + lane / 4;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* const sink =
          p.sinks ? p.sinks + work.batch * p.sinks_stride + work.head : nullptr;
      const RowResult result = row_result(rows[m], units, r, nonempty, sink);
      factor[r] = result.factor;
      if (row + r * 8 < work.queries && lane % 4 == 0) {
        const int64_t at = work.row + int64_t{row + r * 8} * p.heads;
        p.max_logit[at] = result.max_logit;
        p.log_sum[at] = result.log_sum;
      }
    }
    store_fragment<kType, Tr::kQueries, Tr::kE / 2>(
        out, warp_row + m * 16, 0, [&](int i) { return scale_output(o[m][i], factor[i / 2 % 2]); });
  }
  __syncwarp();
  store_tile<Tr::kQueries, Tr::kWarpQueries, Tr::kEBlocks, 32>(
      out + warp_row * 128,
      static_cast<uint16_t*>(p.out) + (work.row + int64_t{warp_row} * p.heads) * p.value_dim,
      int64_t{p.heads} * p.value_dim, work.queries - warp_row, p.value_dim, lane);
}

}  // namespace jax_dsa::masked_attention
