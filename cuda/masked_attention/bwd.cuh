// Masked attention, backward: for 128 keys of one group at a time, over the queries of its heads,
//
//     P = exp(y - lse)                 dS = P * (dout . v - delta) * dy/dx
//     dv += P dout                     dk += scale * dS q
//     dq += scale * dS k               delta = sum(out * dout) - dlse
//     dbias += dS
//
// with y as in fwd.cuh. Blocks are persistent and take items (batch entry, group, 128 keys) by
// tickets. dk and dv of an item stay in registers; dq is added up in f32 in the workspace, by
// reductions. bwd_rows.cuh has what comes before and after: lse, delta, and dq rounded.
//
// Scores are made with keys as rows: the accumulators of P and dS are then operands, from
// registers, of the products for dv and dk. For dq, which wants all 128 keys, dS goes through
// shared memory.
//
// Warpgroups:
//   0, 1  64 keys each: P and dS of a step, dk and dv; and half of the columns of dq
//   2     its first warp lists the steps of an item, 64 queries each, and copies (TMA); the
//         other three make the bits of partial tiles (bwd_producer.cuh)
// Dims beyond 192 are dealt out otherwise (bwd_wide.cuh).
//
// Shared memory, in blocks of 64 columns (128-byte swizzle; see common/tile.cuh), for D = E = 128:
//   k, v     128 rows each, 64 KiB
//   q, dout  a ring of two steps, 32 KiB each
//   ds       of two steps, 128 keys by 64 queries, 16 KiB each
//   out      1 KiB a warp, through which dk and dv leave
//   bias     of two steps, 64 queries by 128 keys, 16 KiB each, if there are any; their gradients
//            take their place (bwd_bias.cuh)
// and lse, delta, bits, descriptions of items and steps, mbarriers.
#pragma once

#include <type_traits>

#include "common/wgmma.cuh"
#include "masked_attention/bwd_bias.cuh"
#include "masked_attention/bwd_producer.cuh"
#include "masked_attention/bwd_rows.cuh"
#include "masked_attention/bwd_wide.cuh"
#include "masked_attention/scores.cuh"

namespace jax_dsa::masked_attention {

// Warpgroup `side`.
template <typename Tr>
__device__ void consume(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                        const CUtensorMap& dbias_map, BwdShared<Tr>& shared, int side) {
  constexpr int kScores = kStepQueries / 2, kSteps = kStepQueries / 16;
  constexpr int kPart = Tr::kPartColumns / 2;  // of a part of dq, a thread's
  // What follows from the thread's number is worked out anew in each step: registers are scarce.
  const auto lane_now = [] { return thread_index() & 31; };
  const auto row_now = [&](int row) {  // of the item's keys
    return side * 64 + (thread_index() >> 5 & 3) * 16 + row;
  };
  const float scale_log2 = p.scale * kLog2E;
  const float cap_inverse = Tr::kGeneral && p.softcap > 0.f ? 1.f / p.softcap : 0.f;
  const uint64_t own_keys = k_major_descriptor(smem_address(shared.k) + side * kBlockBytes);
  const uint64_t own_values = k_major_descriptor(smem_address(shared.v) + side * kBlockBytes);
  // The keys' columns of a part of dq, from key `key` on.
  const auto part_keys = [&](int part, int key) {
    const int column = part * Tr::kPartColumns;
    return mn_major_descriptor(
        smem_address(shared.k) + column / 64 * Tr::kKeyBlockBytes + column % 64 * 2 + key * 128,
        Tr::kKeyBlockBytes);
  };

  float dk[Tr::kD / 2], dv[Tr::kE / 2];
  RingPlace<Tr::kStages> ring;

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane_now() == 0) mbarrier_arrive(barrier);
  };

  // One step: 64 queries of a head. Returns whether it is its item's last.
  const auto step = [&](bool accumulate) {
    const int at = uniform(ring.index);
    const uint32_t q_at = smem_address(shared.q[at]), dout_at = smem_address(shared.dout[at]);
    mbarrier_wait(&shared.q_full[at], ring.parity);
    mbarrier_wait(&shared.checked[at], ring.parity);
    const bool partial = shared.stage[at].partial;

    float s[kScores], dp[kScores];
    if constexpr (!Tr::kGeneral) start_at(s, shared.lse[at]);
    if constexpr (!Tr::kInTurn) start_at(dp, shared.delta[at]);
    const uint64_t q = k_major_descriptor(q_at), dout = k_major_descriptor(dout_at);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kD / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(
          s, own_keys + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
          q + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2, i > 0 || !Tr::kGeneral);
    }
    wgmma_commit();
    const auto multiply_values = [&] {
      mbarrier_wait(&shared.dout_full[at], ring.parity);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Tr::kE / 16; ++i) {
        wgmma_16<Tr::kType, kKMajor, kKMajor>(
            dp, own_values + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
            dout + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2, true);
      }
      wgmma_commit();
    };
    if constexpr (!Tr::kInTurn) multiply_values();
    if (p.deterministic) count_added(shared);
    wgmma_wait<Tr::kInTurn ? 0 : 1>();
    wgmma_pin(s);

    if constexpr (Tr::kBias) {
      mbarrier_wait(&shared.bias.full[at], ring.parity);
      add_bias<Tr::kType>(s, p.scale, [&](int k, uint32_t (&x)[4]) {
        load_matrix_x4_transposed(bias_place(shared.bias, at, side, p.bias.queries == 1, k), x);
      });
    }
    if constexpr (Tr::kGeneral) {
      cap_scores(s, Tr::kBias ? 1.f : p.scale, p.softcap, cap_inverse);
    }
    if (partial) hide(s, &shared.bits[at][row_now(lane_now() / 4)]);
    const auto lse_of = [&](int i) {  // of the queries of scores i and i + 1
      return *reinterpret_cast<const float2*>(&shared.lse[at][i / 4 * 8 + lane_now() % 4 * 2]);
    };
    const int lane = lane_now();
    const uint32_t own_row = row_now(lane % 16) * 128;
    const auto chunk = [&](int k) { return own_row + ((2 * k + lane / 16) ^ (lane % 8)) * 16; };
    uint32_t probabilities[kSteps][4], gradients[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 8 * k + 2 * j;
        if constexpr (Tr::kGeneral) {
          const float2 lse = lse_of(i);
          s[i] = exp2_approx(exponent<Tr::kBias>(s[i], lse.x));
          s[i + 1] = exp2_approx(exponent<Tr::kBias>(s[i + 1], lse.y));
        } else {
          s[i] = exp2_approx(s[i] * scale_log2);
          s[i + 1] = exp2_approx(s[i + 1] * scale_log2);
        }
        probabilities[k][j] = pack_16<Tr::kType>(s[i], s[i + 1]);
      }
      if constexpr (Tr::kInTurn) {
        store_matrix_x4(smem_address(shared.p) + chunk(k), probabilities[k][0], probabilities[k][1],
                        probabilities[k][2], probabilities[k][3]);
      }
    }

    if constexpr (Tr::kInTurn) {
      start_at(dp, shared.delta[at]);
      multiply_values();
    }
    wgmma_wait<0>();
    wgmma_pin(dp);
    const uint32_t ds_at = smem_address(shared.ds[at]);
    const auto load_probabilities = [&](int k) {
      if constexpr (Tr::kInTurn) {
        load_matrix_x4(smem_address(shared.p) + chunk(k), probabilities[k]);
      }
    };
    const auto probability = [&](int k, int j) {  // of two scores
      const int i = 8 * k + 2 * j;
      return Tr::kInTurn ? unpack_16<Tr::kType>(probabilities[k][j]) : make_float2(s[i], s[i + 1]);
    };
    if (Tr::kGeneral && cap_inverse > 0.f) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_probabilities(k);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 8 * k + 2 * j;
          cap_gradients<Tr::kBias>(dp[i], dp[i + 1], probability(k, j), lse_of(i), cap_inverse);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      load_probabilities(k);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 8 * k + 2 * j;
        const float2 ds =
            score_gradients(probability(k, j), make_float2(dp[i], dp[i + 1]), partial);
        gradients[k][j] = pack_16<Tr::kType>(ds.x, ds.y);
        if constexpr (Tr::kBias) dp[i] = ds.x, dp[i + 1] = ds.y;
      }
      store_matrix_x4(ds_at + chunk(k), gradients[k][0], gradients[k][1], gradients[k][2],
                      gradients[k][3]);
      if constexpr (Tr::kBias) {
        if (w.dbias == nullptr) {
          store_matrix_x4_transposed(bias_place(shared.bias, at, side, false, k), gradients[k][0],
                                     gradients[k][1], gradients[k][2], gradients[k][3]);
        }
      }
    }
    if constexpr (Tr::kBias) {
      if (w.dbias) {
        sum_bias_gradients(p, w.dbias, shared.item.batch, shared.stage[at].head,
                           shared.stage[at].query, shared.item.key + side * 64, dp);
      }
    }
    fence_async_proxy();

    const uint64_t dout_rows = mn_major_descriptor(dout_at, Tr::kQBlockBytes);
    const uint64_t q_rows = mn_major_descriptor(q_at, Tr::kQBlockBytes);
    const uint64_t ds = mn_major_descriptor(ds_at, sizeof(shared.ds[0]));
    const auto add_to_dv = [&] {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint64_t b = dout_rows + k * (16 * 128 / 16);
        if constexpr (Tr::kInTurn) {
          const uint64_t a = k_major_descriptor(smem_address(shared.p) + side * kBlockBytes);
          wgmma_16<Tr::kType, kKMajor, kMNMajor>(dv, a + k * 2, b, k > 0 || accumulate);
        } else {
          wgmma_16<Tr::kType, kMNMajor>(dv, probabilities[k], b, k > 0 || accumulate);
        }
      }
      wgmma_commit();
    };
    const auto add_to_dk = [&] {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint64_t b = q_rows + k * (16 * 128 / 16);
        if constexpr (Tr::kInTurn) {
          const uint64_t a = k_major_descriptor(ds_at + side * kBlockBytes);
          wgmma_16<Tr::kType, kKMajor, kMNMajor>(dk, a + k * 2, b, k > 0 || accumulate);
        } else {
          wgmma_16<Tr::kType, kMNMajor>(dk, gradients[k], b, k > 0 || accumulate);
        }
      }
      wgmma_commit();
    };
    float dq[kPart];
    // Part `part` of dq, over kCount keys from `key` on.
    const auto multiply_keys = [&]<int kCount>(std::integral_constant<int, kCount>, int part,
                                               int key) {
      const uint64_t a = moved(ds, key * 128), b = part_keys(part, key);
#pragma unroll
      for (int k = 0; k < kCount / 16; ++k) {
        wgmma_16<Tr::kType, kMNMajor, kMNMajor>(dq, a + k * (16 * 128 / 16),
                                                b + k * (16 * 128 / 16), k > 0);
      }
      wgmma_commit();
    };
    const auto add_part = [&](int part) {
      wgmma_pin(dq);
      add_dq(dq, w.dq, shared.stage[at].step * Tr::kParts + part);
    };
    const BwdStage& stage = shared.stage[at];
    // A stage has its buffer of dS: that both warpgroups have come to the barrier of one step tells
    // that they have read dS of the step before.
    wgmma_fence();
    if constexpr (!Tr::kInTurn) add_to_dv();
    named_barrier_sync<256>(kGradients);
    if constexpr (Tr::kBias) {
      if (thread_index() == 0 && w.dbias == nullptr) {
        store_bias_gradients(dbias_map, shared.bias, at, shared.item.batch, shared.stage[at].head,
                             shared.stage[at].query, shared.item.key);
      }
    }
    if constexpr (Tr::kInTurn) {
      wgmma_fence();
      add_to_dv();
      multiply_keys(std::integral_constant<int, 64>(), 2, side * 64);
      if (p.deterministic) wait_for_turn(w, shared, stage.step, 2, 2 * stage.turn + side);
      wgmma_wait<0>();
      add_part(2);
    }
    wgmma_fence();
    multiply_keys(std::integral_constant<int, Tr::kKeys>(), side, 0);
    add_to_dk();
    if (p.deterministic) wait_for_turn(w, shared, stage.step, side, stage.turn);
    wgmma_wait<1>();
    add_part(side);
    wgmma_wait<0>();
    wgmma_pin(dk);
    wgmma_pin(dv);
    const bool last = shared.stage[at].last;
    arrive(&shared.free[at]);
    if constexpr (Tr::kBias) {
      static_assert(Tr::kBiasBuffers == Tr::kStages);
      if (thread_index() == 0) {
        bulk_wait_read();
        mbarrier_arrive(&shared.bias.free[at]);
      }
    }
    ring.advance();
    return last;
  };

  walk_items(shared, step, [&](const BwdItem& item) {
    if (p.deterministic) count_added(shared);
    store_keys<Tr::kType>(p, item, dk, dv, row_now(lane_now() / 4), Tr::kKeys, 0, 0,
                          shared.out[thread_index() / 32]);
  });
}

template <typename Tr>
__global__ void __launch_bounds__(kThreads, 1)
    bwd_kernel(const __grid_constant__ MaskedAttentionBwdParams p,
               const __grid_constant__ BwdWork work, const __grid_constant__ BwdWorkspace w,
               const __grid_constant__ Bounds bounds, const __grid_constant__ CUtensorMap q_map,
               const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
               const __grid_constant__ CUtensorMap dout_map,
               const __grid_constant__ CUtensorMap bias_map,
               const __grid_constant__ CUtensorMap dbias_map) {
  auto& shared = dynamic_shared<BwdShared<Tr>>();
  constexpr int kBuilderWarps = kBuilders / 32;
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.item_full, 1);
    mbarrier_init(&shared.kv_full, 1);
    mbarrier_init(&shared.kv_clean, kBuilderWarps);
    mbarrier_init(&shared.kv_free, 8 + kBuilderWarps);
    for (int i = 0; i < Tr::kStages; ++i) {
      mbarrier_init(&shared.listed[i], 1);
      mbarrier_init(&shared.q_full[i], 1);
      mbarrier_init(&shared.dout_full[i], 1);
      mbarrier_init(&shared.checked[i], kBuilderWarps);
      mbarrier_init(&shared.free[i], 8);
    }
    if constexpr (Tr::kBias) {
      for (int i = 0; i < Tr::kBiasBuffers; ++i) {
        mbarrier_init(&shared.bias.full[i], 1);
        mbarrier_init(&shared.bias.free[i], 1);
      }
    }
    for (uint32_t*& counter : shared.adding) counter = nullptr;
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup < 2) {
    raise_registers<Tr::kConsumerRegisters>();
    if constexpr (Tr::kWide) {
      consume_wide<Tr>(p, w, dbias_map, shared, warpgroup);
    } else {
      consume<Tr>(p, w, dbias_map, shared, warpgroup);
    }
  } else {
    lower_registers<Tr::kProducerRegisters>();
    const int thread = threadIdx.x % 128;
    if (thread < 32) {
      copy<Tr>(p, work, w, bounds, q_map, k_map, v_map, dout_map, bias_map, shared);
    } else {
      build<Tr>(p, w, shared, thread - 32);
    }
  }
}

}  // namespace jax_dsa::masked_attention
