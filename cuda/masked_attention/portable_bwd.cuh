// Masked attention, backward pass, with instructions of sm_80. bwd.cuh has the mathematics.
//
// Tiling. A CTA takes one work tile: (batch, KV head, 128, 64 or 32 keys). It loops over the steps
// (64 or 32 queries of one head of the group) that can see these keys. dK and dV stay in registers.
// dQ is accumulated in float32 in the workspace by global reductions.
//
// Warps. All warps take part in every product. For 8 warps and D = E = 128, warp tiles are
//   S, dP   64 queries x 128 keys: 2 x 4 warps with 32 x 32 each
//   dV, dK  128 keys x 128 dims:   4 x 2 warps with 32 x 64 each
//   dQ      64 queries x 128 dims: 2 x 4 warps with 32 x 32 each
// P and dS go through shared memory, as [queries, keys]. A warp that owns a part of the dims owns
// the same columns of each block of 64 dims.
//
// Pipeline. A step has two CTA barriers: before S, when the copies of Q and dO have landed and the
// last step's P and dS have been read, and before dV, when P and dS are written. The copies of the
// next step are issued after S. Arrays with one buffer are copied after the product that reads them
// last, behind another barrier.
//
// Masks. Each warp builds the mask bits of its own queries and keys. Keys that no query sees, and
// queries that see no key, may hold NaN; their copies write zeros.
//
// Shared memory for D = E = 128 (bytes): K, V 64 Ki; Q, dO 2 x 32 Ki; P, dS 32 Ki; lse, delta 1 Ki.
#pragma once

#include "common/mma_tile.cuh"
#include "masked_attention/bwd_rows.cuh"
#include "masked_attention/portable_bwd_bias.cuh"

namespace jax_dsa::masked_attention {

// kD, kE, kGeneral, kBias: see BwdTraits. kKeys, kStep: keys of a work tile and queries of a step.
// kQStages, kDoutStages: buffers of Q and dO.
template <DType kType_, int kD_, int kE_, bool kGeneral_, bool kBias_, int kKeys_, int kStep_,
          int kQStages_, int kDoutStages_>
struct PortableBwdTraits {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_;
  static constexpr bool kGeneral = kGeneral_, kBias = kBias_;
  static constexpr int kKeys = kKeys_, kStep = kStep_;
  static constexpr int kQStages = kQStages_, kDoutStages = kDoutStages_;
  static constexpr int kWarps = kStep / 8, kThreads = kWarps * 32;
  static constexpr int kDBlocks = kD / 64, kEBlocks = kE / 64, kKeyBlocks = ceil_div(kKeys, 64);
  // Warp tiles: kRowTiles * 16 queries by kScoreKeys keys of S and dP; 32 keys by kSlice columns of
  // each block of dK and dV; 32 queries by kDqSlice columns of each block of dQ.
  static constexpr int kRowTiles = kStep / 32, kScoreKeys = kKeys * 2 / kWarps;
  static constexpr int kSlice = 64 * (kKeys / 32) / kWarps, kDqSlice = 64 * (kStep / 32) / kWarps;
  static constexpr int kDqRegisters = kStep * kD / kThreads;
  static_assert(kD % 64 == 0 && kE % 64 == 0 && kQueryTile % kStep == 0);
  static_assert(kScoreKeys % 16 == 0 && kSlice % 16 == 0 && kDqSlice % 16 == 0);
};

// What a CTA knows of its work tile. It is in shared memory to save registers.
struct PortableBwdWork {
  BwdWorkTile tile;
  int first, stop;            // the query tiles that may see the keys
  const QueryBounds* bounds;  // of the batch entry; null if every query sees every key
  const SegmentBounds* segments;
};

template <typename Tr>
struct alignas(128) PortableBwdShared {
  uint8_t k[Tr::kDBlocks][Tr::kKeys * 128];  // then dK
  uint8_t v[Tr::kEBlocks][Tr::kKeys * 128];  // then dV
  uint8_t q[Tr::kQStages][Tr::kDBlocks][Tr::kStep * 128];
  uint8_t dout[Tr::kDoutStages][Tr::kEBlocks][Tr::kStep * 128];
  uint8_t p[Tr::kKeyBlocks][Tr::kStep * 128];  // before: the biases
  uint8_t ds[Tr::kKeyBlocks][Tr::kStep * 128];
  float lse[2][Tr::kStep], delta[2][Tr::kStep];
  PortableBwdWork work;
  uint32_t* pending_add[Tr::kWarps];  // the counter of the warp's last addition to dQ
};

// A step: `kStep` queries of one head.
struct PortableStep {
  int head, query;  // kNoStep: there is no step
  bool partial, huge;
  uint64_t fully_masked;  // one bit per query
};

inline constexpr int kNoStep = -kQueryTile;

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    portable_bwd_kernel(const __grid_constant__ MaskedAttentionBwdParams p,
                        const __grid_constant__ BwdTileScheduler scheduler,
                        const __grid_constant__ BwdWorkspace w,
                        const __grid_constant__ Bounds bounds) {
  constexpr DType kType = Tr::kType;
  constexpr int kStep = Tr::kStep, kKeys = Tr::kKeys, kM = Tr::kRowTiles;
  auto& shared = dynamic_shared<PortableBwdShared<Tr>>();
  PortableBwdWork& work = shared.work;
  const int keys = static_cast<int>(p.keys), heads_per_group = p.heads / p.groups;
  const int query_tiles = static_cast<int>(ceil_div(p.queries, int64_t{kQueryTile}));

  if (threadIdx.x == 0) {
    // CTAs start in the order of the work tiles, so that ordered sums cannot deadlock.
    work.tile = scheduler.work_tile(p, atomicAdd(w.tile_counter, 1u));
    BwdWorkTile& tile = work.tile;
    work.bounds = bounds.queries ? bounds.queries + int64_t{tile.batch} * query_tiles : nullptr;
    work.segments = bounds.segments
                        ? bounds.segments + int64_t{tile.batch} * ceil_div(keys, kKeyTile)
                        : nullptr;
    work.first = 0, work.stop = query_tiles;
    for (uint32_t& x : tile.unseen) x = 0;
    if (work.bounds) {
      const KeyBounds x =
          w.keys[(int64_t{tile.batch} * p.groups + tile.group) * scheduler.key_tiles +
                 tile.key / kKeys];
      work.first = x.first, work.stop = max(x.first, x.stop);
      for (int i = 0; i < 4; ++i) tile.unseen[i] = x.unseen[i];
    }
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.pending_add[threadIdx.x / 32] = nullptr;

  // ---- the steps. All warps take the same.
  const int span = work.stop - work.first;
  const auto query_tile = [&](int n) {
    // With ordered sums, iterate from the last queries to the first; see bwd_producer.cuh.
    return p.deterministic ? work.stop - 1 - n : work.first + n;
  };
  const auto map_of = [&](int head) {
    return map_tiles(p.mask, mask_map_index(p.mask, work.tile.batch, head, p.heads));
  };
  const auto head_of = [&](int n) { return work.tile.group * heads_per_group + n / span; };
  TileWalk tiles(0, heads_per_group * span, [&](int n) {
    const int tile = query_tile(n % span);
    return classify_key_tile<kKeys>(p.mask, work.bounds ? work.bounds + tile : nullptr,
                                    work.segments, map_of(head_of(n)), keys, work.tile.key / kKeys);
  });
  // The index of a step in the workspace, in units of kStep queries.
  const auto step_index = [&](const PortableStep& x) {
    return (int64_t{work.tile.batch} * p.heads + x.head) * scheduler.steps *
               (kStepQueries / kStep) +
           x.query / kStep;
  };
  // Returns the step after x.
  const auto next_step = [&](PortableStep x) {
    x.query += kStep;
    if (x.query % kQueryTile == 0 || x.query >= p.queries) {  // also the first time
      if (!tiles.has_tile()) return PortableStep{0, kNoStep};
      const int n = tiles.tile();
      x = {head_of(n), query_tile(n % span) * kQueryTile, tiles.partial()};
      tiles.advance();
    }
    const int64_t index = step_index(x) / (kStepQueries / kStep);
    x.huge = w.huge[index];
    x.fully_masked = w.fully_masked[index] >> (x.query % kStepQueries);
    return x;
  };

  // ---- copies
  const auto load_rows = [&](auto columns, uint32_t to, const void* from, int dim,
                             const PortableStep& x) {
    constexpr int kBlocks = decltype(columns)::value;
    const int64_t row = (work.tile.batch * p.queries + x.query) * p.heads + x.head;
    load_tile<kStep, kBlocks, Tr::kThreads>(
        to, static_cast<const uint16_t*>(from) + row * dim, int64_t{p.heads} * dim, dim,
        [&](int r) { return x.query + r < p.queries && !(x.fully_masked >> r & 1); });
  };
  const auto load_q = [&](const PortableStep& x, int stage) {
    if (x.query < 0) return;
    load_rows(std::integral_constant<int, Tr::kDBlocks>(),
              smem_address(shared.q[stage % Tr::kQStages]), p.q, p.dim, x);
  };
  const auto load_dout = [&](const PortableStep& x, int stage) {
    if (x.query < 0) return;
    load_rows(std::integral_constant<int, Tr::kEBlocks>(),
              smem_address(shared.dout[stage % Tr::kDoutStages]), p.dout, p.value_dim, x);
  };
  const auto load_sums = [&](const PortableStep& x, int stage) {
    if (x.query < 0 || threadIdx.x >= kStep / 2) return;
    const bool second = threadIdx.x >= kStep / 4;
    const int at = threadIdx.x % (kStep / 4) * 4;
    cp_async_16(smem_address(second ? shared.delta[stage] : shared.lse[stage]) + at * 4,
                (second ? w.delta : w.lse) + step_index(x) * kStep + at, true);
  };

  {
    const int64_t row = (work.tile.batch * p.keys + work.tile.key) * p.groups + work.tile.group;
    const auto seen = [&](int r) {
      return r < keys - work.tile.key && !(work.tile.unseen[r / 32] >> r % 32 & 1);
    };
    load_tile<kKeys, Tr::kDBlocks, Tr::kThreads>(smem_address(shared.k),
                                                 static_cast<const uint16_t*>(p.k) + row * p.dim,
                                                 int64_t{p.groups} * p.dim, p.dim, seen);
    load_tile<kKeys, Tr::kEBlocks, Tr::kThreads>(
        smem_address(shared.v), static_cast<const uint16_t*>(p.v) + row * p.value_dim,
        int64_t{p.groups} * p.value_dim, p.value_dim, seen);
  }

  // ---- products
  // The place of the warp in the warp tiles. These are recomputed where they are used, like all
  // that depends on the thread; keeping them would cost registers that the accumulators need.
  constexpr int kKeyWarps = kKeys / 32, kQueryWarps = kStep / 32;
  const auto lane = [] { return thread_index() & 31; };
  const auto warp = [] { return thread_index() >> 5; };
  const auto score_row = [&] { return warp() % 2 * (kStep / 2); };
  const auto score_key = [&] { return warp() / 2 * Tr::kScoreKeys; };
  const auto own_key = [&] { return warp() % kKeyWarps * 32; };
  const auto own_column = [&] { return warp() / kKeyWarps * Tr::kSlice; };
  const auto dq_row = [&] { return warp() % kQueryWarps * 32; };
  const auto dq_column = [&] { return warp() / kQueryWarps * Tr::kDqSlice; };
  const uint32_t p_tile = smem_address(shared.p), ds_tile = smem_address(shared.ds);
  constexpr int kScores = Tr::kScoreKeys / 2;
  const float scale_log2 = Tr::kGeneral ? kLog2E : p.scale * kLog2E;
  const float cap_inverse = Tr::kGeneral && p.softcap > 0.f ? 1.f / p.softcap : 0.f;

  float dk[2][Tr::kD * Tr::kSlice / 128], dv[2][Tr::kE * Tr::kSlice / 128];
  clear_fragments(dk);
  clear_fragments(dv);
  const auto publish_add = [&] {
    __syncwarp();
    if (lane() > 0 || !shared.pending_add[warp()]) return;
    counter_add<false>(shared.pending_add[warp()]);
    shared.pending_add[warp()] = nullptr;
  };

  PortableStep step = next_step({0, -kStep}), next;
  load_q(step, 0);
  load_dout(step, 0);
  load_sums(step, 0);
  for (int stage = 0; step.query >= 0; stage ^= 1, step = next) {
    cp_async_wait();
    __syncthreads();
    const uint32_t q_tile = smem_address(shared.q[stage % Tr::kQStages]);
    const uint32_t dout_tile = smem_address(shared.dout[stage % Tr::kDoutStages]);
    if constexpr (Tr::kBias) {
      const AttentionBias& b = p.bias;
      const int64_t width = bias_row(p.keys), stride = b.queries == 1 ? 0 : width;
      const int64_t head =
          int64_t{b.batch == 1 ? 0 : work.tile.batch} * b.heads + step.head / (p.heads / b.heads);
      load_tile<kStep, Tr::kKeyBlocks, Tr::kThreads>(
          p_tile,
          static_cast<const uint16_t*>(b.x) + head * b.queries * width + step.query * stride +
              work.tile.key,
          stride, static_cast<int>(min(width - work.tile.key, int64_t{kKeys})),
          [&](int r) { return step.query + r < p.queries; });
    }
    next = next_step(step);
    uint32_t earlier_adds = 0;
    if (p.deterministic) {
      const int tile = step.query / kQueryTile;
      earlier_adds = visible_tiles_before<kKeys>(p.mask, work.bounds ? work.bounds + tile : nullptr,
                                                 work.segments, map_of(step.head), keys,
                                                 work.tile.key / kKeys);
    }
    float s[kM][kScores];
    clear_fragments(s);
    multiply_tiles<kType, Tr::kD / 16>(
        s, Operand<Side::kA, false, kStep>(q_tile, score_row(), 0),
        Operand<Side::kB, false, kKeys>(smem_address(shared.k), score_key(), 0));
    if constexpr (Tr::kBias) {
      cp_async_wait();
      __syncthreads();
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const Operand<Side::kA, false, kStep> bias(p_tile, score_row() + 16 * m, score_key());
        add_bias<kType>(s[m], p.scale, [&](int k, uint32_t (&x)[4]) { bias.load(0, k, x); });
      }
      __syncwarp();  // P overwrites the biases
    }
    if constexpr (Tr::kQStages == 2) load_q(next, stage ^ 1);
    if constexpr (Tr::kDoutStages == 2) load_dout(next, stage ^ 1);
    load_sums(next, stage ^ 1);
    if (p.deterministic) publish_add();

    // Masks and huge rows. A capped score must stay as it is, because its derivative follows from
    // it, so huge rows are subtracted from general scores later.
    const auto row_of = [&](int m, int r) { return score_row() + 16 * m + lane() / 4 + r * 8; };
    const auto huge_row = [&](int m, int r) {
      return w.huge_rows[step_index(step) * kStep + row_of(m, r)];
    };
    float lse[kM][2], to_log2 = scale_log2;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (Tr::kGeneral) {
        cap_scores(s[m], Tr::kBias ? 1.f : p.scale, p.softcap, cap_inverse);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) lse[m][r] = shared.lse[stage][row_of(m, r)];
    }
    if (step.huge) {
      to_log2 = kLog2E;
#pragma unroll
      for (int m = 0; m < kM && !Tr::kGeneral; ++m) {
        const HugeRow rows[2] = {huge_row(m, 0), huge_row(m, 1)};
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          const HugeRow& row = rows[i / 2 % 2];
          s[m][i] = __fmul_rn(s[m][i], p.scale) - row.max_logit - row.log_sum;
        }
      }
    }
    if (step.partial) {
      uint32_t bits[1][1];
      query_bits<32>(p.mask, mask_map_index(p.mask, work.tile.batch, step.head, p.heads),
                     work.tile.batch, step.query + score_row(), p.queries,
                     (work.tile.key + score_key()) / 32 * 32, keys, bits);
#pragma unroll
      for (int j = 0; j < 2 * kM; ++j) {
        const uint32_t visible = __shfl_sync(~0u, bits[0][0], lane() / 4 + 8 * j) >>
                                 ((work.tile.key + score_key()) % 32 + lane() % 4 * 2);
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
          float& x = s[j / 2][i / 2 * 4 + j % 2 * 2 + i % 2];
          if (!(visible >> (i / 2 * 8 + i % 2) & 1)) x = -INFINITY;
        }
      }
    }

    // dP, and the probabilities beside it
    float dp[kM][kScores];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) dp[m][i] = -shared.delta[stage][row_of(m, i / 2 % 2)];
    }
    const auto probability = [&](int m, int i, float x) {
      return exp2_approx(fmaf(x, to_log2, -lse[m][i / 2 % 2]));
    };
    multiply_tiles<kType, Tr::kE / 16>(
        dp, Operand<Side::kA, false, kStep>(dout_tile, score_row(), 0),
        Operand<Side::kB, false, kKeys>(smem_address(shared.v), score_key(), 0), [&](int k) {
          constexpr int kAll = kM * kScores, kEach = ceil_div(kAll, Tr::kE / 16);
#pragma unroll
          for (int j = 0; j < kEach; ++j) {
            const int i = k * kEach + j, m = i / kScores;
            if (Tr::kGeneral || i >= kAll) continue;
            float& x = s[m][i % kScores];
            x = probability(m, i % kScores, x);
          }
        });
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      HugeRow rows[2] = {};
      if (Tr::kGeneral && step.huge) rows[0] = huge_row(m, 0), rows[1] = huge_row(m, 1);
      store_fragment<kType, kStep, kScores>(p_tile, score_row() + 16 * m, score_key(), [&](int i) {
        if constexpr (!Tr::kGeneral) return s[m][i];
        const HugeRow& row = rows[i / 2 % 2];
        const float x = probability(m, i, s[m][i] - row.max_logit - row.log_sum);
        const float z = s[m][i] * cap_inverse;
        s[m][i] = cap_inverse > 0.f && x > 0.f ? x * (1.f - z * z) : x;
        return x;
      });
    }
    if (step.partial) {  // dP is undefined where the mask hides a score
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) dp[m][i] = s[m][i] == 0.f ? 0.f : dp[m][i];
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[m][i] *= dp[m][i];
      store_fragment<kType, kStep, kScores>(ds_tile, score_row() + 16 * m, score_key(),
                                            [&](int i) { return s[m][i]; });
    }
    if constexpr (Tr::kBias) {
      if (w.dbias)
        add_bias_gradients(p, w.dbias, work.tile.batch, step.head, step.query + score_row(),
                           work.tile.key + score_key(), s);
    }
    __syncthreads();
    if constexpr (Tr::kBias) {
      if (w.dbias == nullptr) {
        const int64_t width = bias_row(p.keys);
        const int64_t row =
            (int64_t{work.tile.batch} * p.heads + step.head) * p.queries + step.query;
        store_tile<kStep, kStep, Tr::kKeyBlocks, Tr::kThreads>(
            ds_tile, static_cast<uint16_t*>(p.dbias) + row * width + work.tile.key, width,
            static_cast<int>(min(p.queries - step.query, int64_t{kStep})),
            static_cast<int>(min(width - work.tile.key, int64_t{kKeys})), threadIdx.x);
      }
    }
    multiply_tiles<kType, kStep / 16>(
        dv, Operand<Side::kA, true, kStep, 32>(p_tile, 0, own_key()),
        Operand<Side::kB, true, kStep, Tr::kSlice>(dout_tile, 0, own_column()));
    if constexpr (Tr::kDoutStages == 1) {
      __syncthreads();
      load_dout(next, 0);
    }
    float dq[2][Tr::kDqRegisters / 2];
    clear_fragments(dq);
    multiply_tiles<kType, kKeys / 16>(
        dq, Operand<Side::kA, false, kStep>(ds_tile, dq_row(), 0),
        Operand<Side::kB, true, kKeys, Tr::kDqSlice>(smem_address(shared.k), 0, dq_column()));
    const int64_t index = step_index(step);
    if (p.deterministic) {
      uint32_t* const counter = w.add_counts + index / (kStepQueries / kStep) * (kMaxDqSlices * 4) +
                                index % (kStepQueries / kStep) * Tr::kWarps + warp();
      counter_wait<false>(counter, earlier_adds);
      __syncwarp();
      if (lane() == 0) shared.pending_add[warp()] = counter;
    }
    float* const sums = w.dq + index * (kStep * Tr::kD) + thread_index();
#pragma unroll
    for (int i = 0; i < Tr::kDqRegisters; ++i) {
      atomicAdd(sums + i * Tr::kThreads, dq[i * 2 / Tr::kDqRegisters][i % (Tr::kDqRegisters / 2)]);
    }
    multiply_tiles<kType, kStep / 16>(
        dk, Operand<Side::kA, true, kStep, 32>(ds_tile, 0, own_key()),
        Operand<Side::kB, true, kStep, Tr::kSlice>(q_tile, 0, own_column()));
    if constexpr (Tr::kQStages == 1) {
      __syncthreads();
      load_q(next, 0);
    }
  }

  // ---- results
  if (p.deterministic) publish_add();
  cp_async_wait();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int row = own_key() + 16 * m;
    store_fragment<kType, kKeys, Tr::kD * Tr::kSlice / 128, Tr::kSlice>(
        smem_address(shared.k), row, own_column(), [&](int i) { return dk[m][i] * p.scale; });
    store_fragment<kType, kKeys, Tr::kE * Tr::kSlice / 128, Tr::kSlice>(
        smem_address(shared.v), row, own_column(), [&](int i) { return dv[m][i]; });
  }
  __syncthreads();
  const int64_t row = (work.tile.batch * p.keys + work.tile.key) * p.groups + work.tile.group;
  store_tile<kKeys, kKeys, Tr::kDBlocks, Tr::kThreads>(
      smem_address(shared.k), static_cast<uint16_t*>(p.dk) + row * p.dim, int64_t{p.groups} * p.dim,
      keys - work.tile.key, p.dim, threadIdx.x);
  store_tile<kKeys, kKeys, Tr::kEBlocks, Tr::kThreads>(
      smem_address(shared.v), static_cast<uint16_t*>(p.dv) + row * p.value_dim,
      int64_t{p.groups} * p.value_dim, keys - work.tile.key, p.value_dim, threadIdx.x);
}

// Scales and rounds dQ; one CTA per step, with the threads of the main kernel.
template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads)
    portable_dq_kernel(const __grid_constant__ MaskedAttentionBwdParams p, const float* sums,
                       int64_t steps) {
  constexpr int kStep = Tr::kStep;
  auto& tile = dynamic_shared<uint8_t[Tr::kDBlocks][kStep * 128]>();
  const int warp = threadIdx.x / 32;
  constexpr int kQueryWarps = kStep / 32;
  const int row = warp % kQueryWarps * 32, column = warp / kQueryWarps * Tr::kDqSlice;
  const float* const from = sums + blockIdx.x * int64_t{kStep * Tr::kD} + threadIdx.x;
  float x[2][Tr::kDqRegisters / 2];
#pragma unroll
  for (int i = 0; i < Tr::kDqRegisters; ++i) {
    x[i * 2 / Tr::kDqRegisters][i % (Tr::kDqRegisters / 2)] = __ldcs(from + i * Tr::kThreads);
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    store_fragment<Tr::kType, kStep, Tr::kDqRegisters / 2, Tr::kDqSlice>(
        smem_address(tile), row + 16 * m, column, [&](int i) { return x[m][i] * p.scale; });
  }
  __syncthreads();
  const int64_t index = blockIdx.x, pair = index / steps, query = (index - pair * steps) * kStep;
  const int64_t batch = pair / p.heads, head = pair - batch * p.heads;
  store_tile<kStep, kStep, Tr::kDBlocks, Tr::kThreads>(
      smem_address(tile),
      static_cast<uint16_t*>(p.dq) + ((batch * p.queries + query) * p.heads + head) * p.dim,
      int64_t{p.heads} * p.dim,
      static_cast<int>(max(int64_t{0}, min(p.queries - query, int64_t{kStep}))), p.dim,
      threadIdx.x);
}

}  // namespace jax_dsa::masked_attention
