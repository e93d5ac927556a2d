// MMA warpgroups of the masked attention backward kernel for dims above 192. See bwd.cuh.
//
// dK and dV of 64 keys fill the registers of both warpgroups. A work tile therefore has 64 keys,
// and each warpgroup owns half of the columns of dK, dV and dQ. Warpgroup 0 computes P and
// warpgroup 1 computes dS. They exchange P and dS through shared memory. With a softcap, warpgroup
// 0 also writes the derivatives of the softcap to the buffer of dS, where dS later replaces them.
#pragma once

#include "common/store_rows.cuh"
#include "common/wgmma.cuh"
#include "masked_attention/bwd_bias.cuh"
#include "masked_attention/scores.cuh"

namespace jax_dsa::masked_attention {

// The main loop of MMA warpgroup `warpgroup`.
template <typename Tr>
__device__ void consume_wide(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                             const CUtensorMap& dbias_map, BwdShared<Tr>& shared, int warpgroup) {
  constexpr int kScores = kStepQueries / 2, kSteps = kStepQueries / 16;
  constexpr int kDHalf = Tr::kD / 2, kEHalf = Tr::kE / 2;
  static_assert(kDHalf % 64 == 0 && kEHalf % 64 == 0 && Tr::kKeys == 64);
  const float scale_log2 = p.scale * kLog2E;
  const float cap_inverse = Tr::kGeneral && p.softcap > 0.f ? 1.f / p.softcap : 0.f;
  const bool capped = Tr::kGeneral && cap_inverse > 0.f;

  float dk[kDHalf / 2], dv[kEHalf / 2];
  RingPlace<Tr::kStages> ring;
  RingPlace<Tr::kBiasBuffers> bias;

  const auto lane_now = [] { return thread_index() & 31; };
  const auto row_now = [](int row) { return (thread_index() >> 5 & 3) * 16 + row; };
  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane_now() == 0) mbarrier_arrive(barrier);
  };
  // Computes x (+)= a b^T for two tiles [64, kDim] in shared memory.
  const auto multiply_rows = [&]<int kDim>(std::integral_constant<int, kDim>, float (&x)[kScores],
                                           const void* a, int a_block, const void* b, int b_block,
                                           bool accumulate) {
    const uint64_t left = k_major_descriptor(smem_address(a));
    const uint64_t right = k_major_descriptor(smem_address(b));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(x, left + i / 4 * (a_block / 16) + i % 4 * 2,
                                            right + i / 4 * (b_block / 16) + i % 4 * 2,
                                            i > 0 || accumulate);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(x);
  };

  // Processes one step. Returns whether it is the last one of its work tile.
  const auto step = [&](bool accumulate) {
    const int at = uniform(ring.index);
    mbarrier_wait(&shared.q_full[at], ring.parity);
    mbarrier_wait(&shared.step_ready[at], ring.parity);
    const int flags = shared.flags[at];
    const bool partial = flags & kPartial;
    const auto lse_of = [&](int i) {  // lse of the queries of scores i and i + 1
      return *reinterpret_cast<const float2*>(&shared.lse[at][i / 4 * 8 + lane_now() % 4 * 2]);
    };
    const int lane = lane_now();
    const uint32_t own_row = row_now(lane % 16) * 128;
    const auto chunk = [&](int k) { return own_row + ((2 * k + lane / 16) ^ (lane % 8)) * 16; };
    const uint32_t p_at = smem_address(shared.p), ds_at = smem_address(shared.ds[0]);
    const auto ds_chunk = [&](int k) { return ds_at + chunk(k); };
    uint32_t probabilities[kSteps][4];
    float x[kScores];
    if (warpgroup == 0) {
      if constexpr (!Tr::kGeneral) init_negated(x, shared.lse[at]);
      multiply_rows(std::integral_constant<int, Tr::kD>(), x, shared.k, Tr::kKeyBlockBytes,
                    shared.q[at], Tr::kQBlockBytes, !Tr::kGeneral);
      if constexpr (Tr::kBias) {
        mbarrier_wait(&shared.bias.full[bias.index], bias.parity);
        add_bias<Tr::kType>(x, p.scale, [&](int k, uint32_t (&y)[4]) {
          load_matrix_x4_transposed(
              bias_fragment(shared.bias, bias.index, 0, p.bias.queries == 1, k), y);
        });
      }
      if constexpr (Tr::kGeneral) {
        cap_scores(x, Tr::kBias ? 1.f : p.scale, p.softcap, cap_inverse);
      }
      if (capped) {
        named_barrier_sync<256>(kDsRead);
        store_cap_derivatives<Tr::kType>(x, cap_inverse, ds_chunk);
      }
      const auto first_row = [&] { return row_now(lane_now() / 4); };
      const float to_log2 = apply_flags(flags, x, w, shared, at, first_row, p.scale, scale_log2);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 8 * k + 2 * j;
          if constexpr (Tr::kGeneral) {
            const float2 lse = lse_of(i);
            x[i] = fmaf(x[i], kLog2E, -lse.x), x[i + 1] = fmaf(x[i + 1], kLog2E, -lse.y);
          } else {
            x[i] *= to_log2, x[i + 1] *= to_log2;
          }
          probabilities[k][j] = pack_16<Tr::kType>(exp2_approx(x[i]), exp2_approx(x[i + 1]));
        }
        store_matrix_x4(p_at + chunk(k), probabilities[k][0], probabilities[k][1],
                        probabilities[k][2], probabilities[k][3]);
      }
      mbarrier_wait(&shared.dout_full[at], ring.parity);
      named_barrier_arrive<256>(kProbabilities);
    } else {
      init_negated(x, shared.delta[at]);
      mbarrier_wait(&shared.dout_full[at], ring.parity);
      multiply_rows(std::integral_constant<int, Tr::kE>(), x, shared.v, Tr::kKeyBlockBytes,
                    shared.dout[at], Tr::kQBlockBytes, true);
      // When warpgroup 0 arrives here, it has finished reading the previous step's dS.
      named_barrier_sync<256>(kProbabilities);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) load_matrix_x4(p_at + chunk(k), probabilities[k]);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t gradients[4];
        if (capped) multiply_by_cap_derivatives<Tr::kType>(&x[8 * k], ds_chunk(k));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 8 * k + 2 * j;
          const float2 y = unpack_16<Tr::kType>(probabilities[k][j]);
          const float2 ds = score_gradients(y, make_float2(x[i], x[i + 1]), partial);
          gradients[j] = pack_16<Tr::kType>(ds.x, ds.y);
          if constexpr (Tr::kBias) x[i] = ds.x, x[i + 1] = ds.y;
        }
        store_matrix_x4(ds_chunk(k), gradients[0], gradients[1], gradients[2], gradients[3]);
        if constexpr (Tr::kBias) {
          if (w.dbias == nullptr) {
            store_matrix_x4_transposed(bias_fragment(shared.bias, bias.index, 0, false, k),
                                       gradients[0], gradients[1], gradients[2], gradients[3]);
          }
        }
      }
      if constexpr (Tr::kBias) {
        if (w.dbias) {
          sum_bias_gradients(p, w.dbias, shared.work_tile.batch, shared.stage[at].head,
                             shared.stage[at].query, shared.work_tile.key, x);
        }
      }
      fence_async_proxy();
      named_barrier_arrive<256>(kGradients);
    }

    const uint64_t dout_half = mn_major_descriptor(
        smem_address(shared.dout[at][warpgroup * kEHalf / 64]), Tr::kQBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_16<Tr::kType, kMNMajor>(dv, probabilities[k], dout_half + k * (16 * 128 / 16),
                                    k > 0 || accumulate);
    }
    wgmma_commit();
    if (warpgroup == 0) {
      named_barrier_sync<256>(kGradients);
    } else {
      named_barrier_sync<128>(kOwnGradients);
      if constexpr (Tr::kBias) {
        if (thread_index() == 128 && w.dbias == nullptr) {
          store_bias_gradients(dbias_map, shared.bias, bias.index, shared.work_tile.batch,
                               shared.stage[at].head, shared.stage[at].query, shared.work_tile.key);
        }
      }
    }
    wgmma_wait<0>();  // dq reuses the registers of the probabilities
    wgmma_pin(dv);
    float dq[kDHalf / 2];
    const uint64_t ds_columns = mn_major_descriptor(ds_at, sizeof(shared.ds[0]));
    const uint64_t ds_rows = k_major_descriptor(ds_at);
    const uint64_t k_half =
        mn_major_descriptor(smem_address(shared.k[warpgroup * kDHalf / 64]), Tr::kKeyBlockBytes);
    const uint64_t q_half =
        mn_major_descriptor(smem_address(shared.q[at][warpgroup * kDHalf / 64]), Tr::kQBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint64_t next = k * (16 * 128 / 16);
      wgmma_16<Tr::kType, kMNMajor, kMNMajor>(dq, ds_columns + next, k_half + next, k > 0);
    }
    wgmma_commit();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_16<Tr::kType, kKMajor, kMNMajor>(dk, ds_rows + k * 2, q_half + k * (16 * 128 / 16),
                                             k > 0 || accumulate);
    }
    wgmma_commit();
    const BwdStage& stage = shared.stage[at];
    if (p.deterministic)
      wait_for_earlier_adds(w, shared, stage.step, warpgroup, stage.earlier_adds);
    wgmma_wait<1>();
    wgmma_pin(dq);
    add_dq(dq, w.dq, shared.stage[at].step * Tr::kDqSlices + warpgroup);
    wgmma_wait<0>();
    wgmma_pin(dk);
    wgmma_pin(dv);
    const bool last = shared.stage[at].last;
    arrive(&shared.free[at]);
    if constexpr (Tr::kBias) {
      if (thread_index() == 128) {
        bulk_wait_read();
        mbarrier_arrive(&shared.bias.free[bias.index]);
      }
      bias.advance();
    }
    if (capped && warpgroup == 1) named_barrier_arrive<256>(kDsRead);
    ring.advance();
    return last;
  };

  if (capped && warpgroup == 1) named_barrier_arrive<256>(kDsRead);
  for_each_work_tile(shared, step, [&](const BwdWorkTile& work_tile) {
    if (p.deterministic) publish_pending_add(shared);
    store_dk_dv<Tr::kType>(p, work_tile, dk, dv, row_now(lane_now() / 4), Tr::kKeys,
                           warpgroup * kDHalf, warpgroup * kEHalf, shared.out[thread_index() / 32]);
  });
  // Consume the last arrival, so that no barrier is left with a pending one.
  if (capped && warpgroup == 0) named_barrier_sync<256>(kDsRead);
}

}  // namespace jax_dsa::masked_attention
