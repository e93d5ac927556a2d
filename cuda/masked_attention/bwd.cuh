// Masked attention, backward: for 128 keys of one group at a time, over the queries of its heads,
//
//     P = exp(y - lse)                 dS = P * (dout . v - delta) * dy/dx
//     dv += P dout                     dk += scale * dS q
//     dq += scale * dS k               delta = sum(out * dout) - dlse
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
//
// Shared memory, in blocks of 64 columns (128-byte swizzle; see common/tile.cuh), for D = E = 128:
//   k, v     128 rows each, 64 KiB
//   q, dout  a ring of two steps, 32 KiB each
//   ds       of two steps, 128 keys by 64 queries, 16 KiB each
//   out      1 KiB a warp, through which dk and dv leave
// and lse, delta, bits, descriptions of items and steps, mbarriers.
#pragma once

#include "common/wgmma.cuh"
#include "masked_attention/bwd_producer.cuh"
#include "masked_attention/bwd_rows.cuh"
#include "masked_attention/scores.cuh"

namespace jax_dsa::masked_attention {

// Warpgroup `side`.
template <typename Tr>
__device__ void consume(const MaskedAttentionBwdParams& p, const BwdWork& work,
                        const BwdWorkspace& w, BwdShared<Tr>& shared, int side) {
  constexpr int kScores = kStepQueries / 2, kSteps = kStepQueries / 16;
  constexpr int kOwn = Tr::kOwnColumns / 2;  // of dq, a thread's
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = side * 64 + warp * 16 + lane / 4;  // of the item's keys
  const float scale_log2 = Tr::kGeneral ? kLog2E : p.scale * kLog2E;
  const float cap_inverse = Tr::kGeneral && p.softcap > 0.f ? 1.f / p.softcap : 0.f;
  const uint64_t own_keys = k_major_descriptor(smem_address(shared.k) + side * kBlockBytes);
  const uint64_t own_values = k_major_descriptor(smem_address(shared.v) + side * kBlockBytes);
  // The columns of the keys that this warpgroup's part of dq takes.
  const uint64_t columns = mn_major_descriptor(
      smem_address(shared.k) + side * Tr::kOwnColumns / 64 * Tr::kKeyBlockBytes +
          side * Tr::kOwnColumns % 64 * 2,
      Tr::kKeyBlockBytes);
  // Where this lane stores its row of an 8x8 matrix of dS, without the swizzled chunk.
  const uint32_t own_ds = smem_address(shared.ds) + (side * 64 + warp * 16 + lane % 16) * 128;

  float dk[Tr::kD / 2], dv[Tr::kE / 2];
  RingPlace<Tr::kStages> ring;
  uint32_t ds_buffer = 0;

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };

  // One step: 64 queries of a head. Returns whether it is its item's last.
  const auto step = [&](const BwdItem& item, bool accumulate) {
    const int at = uniform(ring.index);
    float s[kScores], dp[kScores];
    mbarrier_wait(&shared.q_full[at], ring.parity);
    mbarrier_wait(&shared.checked[at], ring.parity);
    const uint32_t q_at = smem_address(shared.q[at]), dout_at = smem_address(shared.dout[at]);
    const uint64_t q = k_major_descriptor(q_at), dout = k_major_descriptor(dout_at);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kD / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(
          s, own_keys + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
          q + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2, i > 0);
    }
    wgmma_commit();
    mbarrier_wait(&shared.dout_full[at], ring.parity);
#pragma unroll
    for (int i = 0; i < Tr::kE / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(
          dp, own_values + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
          dout + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2, i > 0);
    }
    wgmma_commit();
    const BwdStage stage = shared.stage[at];
    wgmma_wait<1>();
    wgmma_pin(s);
    if constexpr (Tr::kGeneral) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        s[i] *= p.scale;
        if (p.softcap > 0.f) s[i] = softcapped(s[i], p.softcap, cap_inverse);
      }
    }
    if (stage.partial) hide(s, &shared.bits[at][row]);
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[at][i * 2 + lane % 4 * 2]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[i + 2 * r] = exp2_approx(fmaf(s[i + 2 * r], scale_log2, -lse.x));
        s[i + 2 * r + 1] = exp2_approx(fmaf(s[i + 2 * r + 1], scale_log2, -lse.y));
      }
    }
    uint32_t probabilities[kSteps][4], gradients[kSteps][4];
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      probabilities[i / 8][i / 2 % 4] = pack_16<Tr::kType>(s[i], s[i + 1]);
    }
    wgmma_wait<0>();
    wgmma_pin(dp);
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&shared.delta[at][i * 2 + lane % 4 * 2]);
      float2 lse;
      if constexpr (Tr::kGeneral) {
        lse = *reinterpret_cast<const float2*>(&shared.lse[at][i * 2 + lane % 4 * 2]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = s[i + j] * (dp[i + j] - (j % 2 ? delta.y : delta.x));
        dp[i + j] = x;
        if constexpr (Tr::kGeneral) {
          if (p.softcap > 0.f) {
            // y / softcap, as the probability tells it.
            const float t = (log2f(s[i + j]) + (j % 2 ? lse.y : lse.x)) * (kLn2 * cap_inverse);
            dp[i + j] = s[i + j] > 0.f ? x * (1.f - t * t) : 0.f;
          }
        }
      }
    }
    if (stage.partial) {
      // Whatever a hidden value or a query that does not see it may hold.
#pragma unroll
      for (int i = 0; i < kScores; ++i) dp[i] = s[i] == 0.f ? 0.f : dp[i];
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      gradients[i / 8][i / 2 % 4] = pack_16<Tr::kType>(dp[i], dp[i + 1]);
    }

    // Two buffers: that both warpgroups have come to the barrier of one step tells that they have
    // read dS of the step before.
    const uint32_t to = own_ds + ds_buffer * sizeof(shared.ds[0]);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int chunk = (2 * k + lane / 16) ^ (lane % 8);
      store_matrix_x4(to + chunk * 16, gradients[k][0], gradients[k][1], gradients[k][2],
                      gradients[k][3]);
    }
    fence_async_proxy();
    const uint64_t dout_rows = mn_major_descriptor(dout_at, Tr::kQBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_16<Tr::kType, kMNMajor>(dv, probabilities[k], dout_rows + k * (16 * 128 / 16),
                                    k > 0 || accumulate);
    }
    wgmma_commit();
    named_barrier_sync<256>(kGradients);
    float dq[kOwn];
    wgmma_fence();
    const uint64_t ds = mn_major_descriptor(
        smem_address(shared.ds) + ds_buffer * sizeof(shared.ds[0]), sizeof(shared.ds[0]));
#pragma unroll
    for (int k = 0; k < Tr::kKeys / 16; ++k) {
      wgmma_16<Tr::kType, kMNMajor, kMNMajor>(dq, ds + k * (16 * 128 / 16),
                                              columns + k * (16 * 128 / 16), k > 0);
    }
    wgmma_commit();
    const uint64_t q_rows = mn_major_descriptor(q_at, Tr::kQBlockBytes);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_16<Tr::kType, kMNMajor>(dk, gradients[k], q_rows + k * (16 * 128 / 16),
                                    k > 0 || accumulate);
    }
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_pin(dq);
    const int64_t number =
        (int64_t{item.batch} * p.heads + stage.head) * work.steps + stage.query / kStepQueries;
    float* const sum = dq_place<kOwn>(w.dq, number, side);
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      red_add(sum + i * 128, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
    wgmma_wait<0>();
    wgmma_pin(dk);
    wgmma_pin(dv);
    arrive(&shared.free[at]);
    ring.advance();
    ds_buffer ^= 1;
    return stage.last;
  };

  const auto write_results = [&](const BwdItem& item) {
    const int64_t key = int64_t{item.batch} * p.keys + item.key + row;
    const int64_t at = key * p.groups + item.group;
    const int rows_left = static_cast<int>(min(p.keys - item.key, int64_t{Tr::kKeys})) - row;
    const uint32_t stage = smem_address(shared.out[side * 4 + warp]);
    const float dk_factor[2] = {item.some ? p.scale : 0.f, item.some ? p.scale : 0.f};
    const float dv_factor[2] = {item.some ? 1.f : 0.f, item.some ? 1.f : 0.f};
    store_rows<Tr::kType>(dk, dk_factor, stage, static_cast<uint16_t*>(p.dk) + at * p.dim,
                          int64_t{p.groups} * p.dim, rows_left, p.dim);
    store_rows<Tr::kType>(dv, dv_factor, stage, static_cast<uint16_t*>(p.dv) + at * p.value_dim,
                          int64_t{p.groups} * p.value_dim, rows_left, p.value_dim);
  };

  uint32_t kv_parity = 0;
  for (uint32_t parity = 0;; parity ^= 1) {
    mbarrier_wait(&shared.item_full, parity);
    const BwdItem item = shared.item;
    if (item.over) return;
    if (item.some) {
      mbarrier_wait(&shared.kv_full, kv_parity);
      mbarrier_wait(&shared.kv_clean, kv_parity);
      kv_parity ^= 1;
      for (bool accumulate = false; !step(item, accumulate);) accumulate = true;
    }
    arrive(&shared.kv_free);
    write_results(item);
  }
}

template <typename Tr>
__global__ void __launch_bounds__(kThreads, 1)
    bwd_kernel(const __grid_constant__ MaskedAttentionBwdParams p,
               const __grid_constant__ BwdWork work, const __grid_constant__ BwdWorkspace w,
               const __grid_constant__ Bounds bounds, const __grid_constant__ CUtensorMap q_map,
               const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
               const __grid_constant__ CUtensorMap dout_map) {
  auto& shared = dynamic_shared<BwdShared<Tr>>();
  constexpr int kBuilderWarps = kBwdBuilders / 32;
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
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup < 2) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr>(p, work, w, shared, warpgroup);
  } else {
    lower_registers<Tr::kProducerRegisters>();
    const int thread = threadIdx.x % 128;
    if (thread < 32) {
      copy<Tr>(p, work, w, bounds, q_map, k_map, v_map, dout_map, shared);
    } else {
      build<Tr>(p, work, w, bounds, shared, thread - 32);
    }
  }
}

}  // namespace jax_dsa::masked_attention
