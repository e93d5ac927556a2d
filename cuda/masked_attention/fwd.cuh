// Masked attention, forward: for 128 queries of one head at a time,
//
//     x = scale * q . k + bias             y = softcap * tanh(x / softcap), or x
//     lse = log sum over visible keys of exp(y)
//     out = sum over visible keys of exp(y - lse) * v
//
// Blocks are persistent and take items (batch entry, head, 128 queries) by tickets, so that uneven
// masks keep all of them busy. Keys come in tiles of 128, or 64 where values are wide; a tile that
// no query sees is passed over, and of one that all see nothing is tested.
//
// Warpgroups:
//   0, 1  64 queries each: scores, softmax, product with the values
//   2     its first warp lists the tiles of items, its second copies (TMA), the other two make the
//         bits of partial tiles (fwd_producer.cuh)
// The first two take turns: one has its products, the scores of the next tile and then the values
// of this one, while the other is in its softmax.
//
// Running maximum: probabilities are relative to a reference of their row that follows the maximum
// lazily - it moves only when a score exceeds it by 2^8, so the accumulators are rarely rescaled
// and probabilities stay in [0, 256].
//
// Shared memory, in blocks of 64 columns (128-byte swizzle; see common/tile.cuh), for D = E = 128:
//   q     128 rows, 32 KiB
//   k, v  a ring of two tiles, 64 KiB each
//   out   1 KiB a warp, through which outputs leave
//   bits  a word for each query and 32 keys, of four partial tiles, 2 KiB each
// With biases, tiles have 64 keys; there are three, each with 16 KiB of
//   bias  128 queries by 64 keys
// and descriptions of items and tiles, mbarriers.
#pragma once

#include "common/store_rows.cuh"
#include "common/wgmma.cuh"
#include "masked_attention/fwd_plan.cuh"
#include "masked_attention/fwd_producer.cuh"
#include "masked_attention/scores.cuh"

namespace jax_dsa::masked_attention {

// By how much a score may exceed its row's reference, in log2 units.
inline constexpr float kLazyMargin = 8.f;
// Beyond this a reference in log2 units is rounded to a whole number or worse.
inline constexpr float kFar = 0x1p24f;

// State of two rows of an accumulator: a thread has rows r and r + 8.
struct Rows {
  float reference[2];  // log2 units, with biases natural ones; -inf before the first visible score
  float sum[2];        // of this thread's probabilities, relative to the reference

  // What to subtract from a score: 2^(-inf - finite(-inf)) = 0.
  __device__ static float finite(float reference) {
    return reference == -INFINITY ? 0.f : reference;
  }
  // Row r's sum over all keys.
  __device__ float total(int r) const {
    const float x = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
};

// Turns scores into probabilities. Where this moved a reference of the warp's rows, returns true
// and gives the factor that the accumulator needs. A bias may hide all keys of a row by -1e9 or
// more: scores are then as far from 0, and their distance from the reference is taken exactly.
template <bool kBias, int kScores>
__device__ __forceinline__ bool softmax(float (&s)[kScores], float scale_log2, Rows& rows,
                                        float (&factor)[2]) {
  float top[4];  // by i % 4, for instructions that need not wait for each other
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i] = s[i];
#pragma unroll
  for (int i = 4; i < kScores; ++i) top[i % 4] = fmaxf(top[i % 4], s[i]);
  float to[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = fmaxf(top[2 * r], top[2 * r + 1]);
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    if constexpr (!kBias) m *= scale_log2;
    to[r] =
        m > rows.reference[r] + (kBias ? kLazyMargin * kLn2 : kLazyMargin) ? m : rows.reference[r];
  }
  const bool moved = __any_sync(~0u, to[0] != rows.reference[0] || to[1] != rows.reference[1]);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float down = rows.reference[r] - Rows::finite(to[r]);
      factor[r] = exp2_approx(kBias ? down * scale_log2 : down);
      rows.sum[r] *= factor[r];
      rows.reference[r] = to[r];
    }
  }
  float base[2] = {Rows::finite(to[0]), Rows::finite(to[1])};
  if constexpr (kBias) {
    const float from[2] = {base[0], base[1]};
    base[0] *= scale_log2, base[1] *= scale_log2;
    if (__any_sync(~0u, fmaxf(fabsf(base[0]), fabsf(base[1])) > kFar)) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] -= from[i / 2 % 2];
      base[0] = base[1] = 0.f;
    }
  }
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    s[i] = exp2_approx(fmaf(s[i], scale_log2, -base[i / 2 % 2]));
    sum[i % 4] += s[i];
  }
  rows.sum[0] += sum[0] + sum[1];
  rows.sum[1] += sum[2] + sum[3];
  return moved;
}

// Warpgroup kSide.
template <typename Tr, int kSide>
__device__ void consume(const MaskedAttentionFwdParams& p, Shared<Tr>& shared) {
  constexpr int kScores = Tr::kKeys / 2, kSteps = Tr::kKeys / 16, kHeld = Tr::kHeldSteps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = kSide * 64 + warp * 16 + lane / 4;  // of the item's queries
  const float scale_log2 = Tr::kGeneral ? kLog2E : p.scale * kLog2E;
  const float cap_inverse = Tr::kGeneral && p.softcap > 0.f ? 1.f / p.softcap : 0.f;
  const uint64_t q = k_major_descriptor(smem_address(shared.q) + kSide * kBlockBytes);

  float o[Tr::kE / 2];
  float s[kScores];
  uint32_t probabilities[kSteps][4];
  uint32_t held[kHeld > 0 ? kHeld : 1][4];
  float factor[2];
  Rows rows;
  RingPlace<Tr::kStages> k_ring, v_ring;  // of the tiles whose scores, and values, come next
  RingPlace<Tr::kBiasBuffers> bias_ring;
  uint32_t q_parity = 0;

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  const auto load_queries = [&] {
    const uint32_t from =
        smem_address(shared.q) + kSide * kBlockBytes + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int chunk = (i % 4 * 2 + lane / 16) ^ (lane % 8);
      load_matrix_x4(from + i / 4 * Tr::kQBlockBytes + chunk * 16, held[i]);
    }
  };
  // Starts the scores of the next tile.
  const auto start_scores = [&] {
    const int at = uniform(k_ring.index);
    mbarrier_wait(&shared.k_full[at], k_ring.parity);
    if constexpr (Tr::kTurns) named_barrier_sync<256>(kTurn + kSide);
    const uint64_t keys = k_major_descriptor(smem_address(shared.k[at]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kD / 16; ++i) {
      const uint64_t b = keys + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2;
      if constexpr (kHeld == Tr::kD / 16) {
        wgmma_16<Tr::kType, kKMajor>(s, held[i], b, i > 0);
      } else {
        if (i < kHeld) {
          wgmma_16<Tr::kType, kKMajor>(s, held[i < kHeld ? i : 0], b, i > 0);
        } else {
          const uint64_t a = q + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2;
          wgmma_16<Tr::kType, kKMajor, kKMajor>(s, a, b, i > 0);
        }
      }
    }
    wgmma_commit();
  };
  // Starts the product of the probabilities with their values.
  const auto start_values = [&](bool accumulate) {
    const int at = uniform(v_ring.index);
    mbarrier_wait(&shared.v_full[at], v_ring.parity);
    mbarrier_wait(&shared.v_clean[at], v_ring.parity);
    const uint64_t values = mn_major_descriptor(smem_address(shared.v[at]), Tr::kKeyBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wgmma_16<Tr::kType, kMNMajor>(o, probabilities[i], values + i * (16 * 128 / 16),
                                    i > 0 || accumulate);
    }
    wgmma_commit();
  };
  const auto pass_turn = [&] {
    if constexpr (Tr::kTurns) named_barrier_arrive<256>(kTurn + 1 - kSide);
  };
  // What the scores, which are there, make of the tile; frees its keys. Returns whether the
  // accumulator must be scaled by `factor`, and whether the tile is its item's last.
  const auto use_scores = [&](bool& last) {
    wgmma_pin(s);
    const int at = k_ring.index;
    const Stage& stage = shared.stage[at];
    last = stage.last;
    if constexpr (Tr::kGeneral) {
      if constexpr (Tr::kBias) {
        const int tile = bias_ring.index;
        const bool shared_row = p.bias.queries == 1;
        mbarrier_wait(&shared.bias.full[tile], bias_ring.parity);
        add_bias<Tr::kType>(s, p.scale, [&](int k, uint32_t (&x)[4]) {
          load_matrix_x4(bias_chunk(smem_address(shared.bias.tile[tile]), shared_row,
                                    kSide * 64 + warp * 16 + lane % 16, 2 * k + lane / 16),
                         x);
        });
        arrive(&shared.bias.free[tile]);
        bias_ring.advance();
      }
      cap_scores(s, Tr::kBias ? 1.f : p.scale, p.softcap, cap_inverse);
    }
    if (stage.partial) {
      mbarrier_wait(&shared.built[stage.listing], stage.parity);
      hide(s, &shared.bits[stage.listing][row]);
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.unlisted[stage.listing]);
      mbarrier_arrive(&shared.k_free[at]);  // and the stage is another tile's
    }
    k_ring.advance();
    return softmax<Tr::kBias>(s, scale_log2, rows, factor);
  };
  const auto pack = [&] {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      probabilities[i / 8][i / 2 % 4] = pack_16<Tr::kType>(s[i], s[i + 1]);
    }
  };
  const auto finish_values = [&] {
    wgmma_wait<0>();
    wgmma_pin(o);
    arrive(&shared.v_free[v_ring.index]);
    v_ring.advance();
  };
  const auto write_results = [&](const Item& item, bool some) {
    const int64_t token = int64_t{item.batch} * p.queries + item.query + row;
    const int64_t at = token * p.heads + item.head;
    const int64_t stride = int64_t{p.heads} * p.value_dim;
    const int rows_left = static_cast<int>(min(p.queries - item.query, int64_t{kQueryTile})) - row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = some ? rows.total(r) : 0.f;
      const bool empty = total == 0.f;
      factor[r] = empty ? 0.f : 1.f / total;
      if (r * 8 < rows_left && lane % 4 == 0) {
        const float lse = Tr::kBias ? fmaf(log2f(total), kLn2, rows.reference[r])
                                    : (rows.reference[r] + log2f(total)) * kLn2;
        p.lse[at + r * 8 * p.heads] = empty ? -INFINITY : lse;
      }
    }
    store_rows<Tr::kType>(o, factor, smem_address(shared.out[kSide * 4 + warp]),
                          static_cast<uint16_t*>(p.out) + at * p.value_dim, stride, rows_left,
                          p.value_dim);
  };

  // Turns alternate from the first tile to the last.
  if (Tr::kTurns && kSide == 1) named_barrier_arrive<256>(kTurn + 0);
  for (;; q_parity ^= 1) {
    mbarrier_wait(&shared.q_full, q_parity);
    const Item item = shared.item;
    if (item.over) break;
    rows = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
    if (!item.some) {
      arrive(&shared.q_free);
      write_results(item, false);
      continue;
    }
    load_queries();
    if constexpr (kHeld == Tr::kD / 16) arrive(&shared.q_free);

    bool last;
    start_scores();
    pass_turn();
    wgmma_wait<0>();
    use_scores(last);
    pack();
    bool accumulate = false;
    while (!last) {
      start_scores();
      start_values(accumulate);
      pass_turn();
      wgmma_wait<1>();
      const bool moved = use_scores(last);
      finish_values();
      if (moved) {
#pragma unroll
        for (int i = 0; i < Tr::kE / 2; ++i) o[i] *= factor[i / 2 % 2];
      }
      pack();
      accumulate = true;
    }
    if constexpr (kHeld < Tr::kD / 16) arrive(&shared.q_free);
    start_values(accumulate);
    finish_values();
    write_results(item, true);
  }
  // Takes the last turn, so that no barrier is left with arrivals.
  if (Tr::kTurns && kSide == 0) named_barrier_sync<256>(kTurn + 0);
}

template <typename Tr>
__global__ void __launch_bounds__(kThreads, 1)
    fwd_kernel(const __grid_constant__ MaskedAttentionFwdParams p,
               const __grid_constant__ Work work, const __grid_constant__ Bounds bounds,
               const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map,
               const __grid_constant__ CUtensorMap bias_map) {
  auto& shared = dynamic_shared<Shared<Tr>>();
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.q_full, 1);
    mbarrier_init(&shared.q_free, kConsumerWarps);
    for (int i = 0; i < Tr::kListed; ++i) {
      mbarrier_init(&shared.listed[i], 1);
      mbarrier_init(&shared.built[i], 1);
      mbarrier_init(&shared.unlisted[i], kConsumerWarps + 2);
    }
    for (int i = 0; i < Tr::kStages; ++i) {
      mbarrier_init(&shared.k_full[i], 1);
      mbarrier_init(&shared.k_free[i], kConsumerWarps);
      mbarrier_init(&shared.v_full[i], 1);
      mbarrier_init(&shared.v_clean[i], 1);
      mbarrier_init(&shared.v_free[i], kConsumerWarps);
    }
    if constexpr (Tr::kBias) {
      for (int i = 0; i < Tr::kBiasBuffers; ++i) {
        mbarrier_init(&shared.bias.full[i], 1);
        mbarrier_init(&shared.bias.free[i], kConsumerWarps);
      }
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr, 0>(p, shared);
  } else if (warpgroup == 1) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr, 1>(p, shared);
  } else {
    lower_registers<Tr::kProducerRegisters>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) {
      list<Tr>(p, work, bounds, shared);
    } else if (warp == 1) {
      copy<Tr>(p, q_map, k_map, v_map, bias_map, shared);
    } else {
      build<Tr>(p, shared, warp - 2);
    }
  }
}

}  // namespace jax_dsa::masked_attention
