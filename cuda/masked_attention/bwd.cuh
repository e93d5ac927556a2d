// Masked attention, backward pass.
//
//   P  = exp(y - max_logit - log_sum)                                    dP = dO V^T
//   dS = P * dy/dx * (dP - delta)
//   dV = P^T dO                      dK = scale * dS^T Q                 dQ = scale * dS K
//   dbias = dS                       delta = rowsum(O * dO) - dlse
//
// with x and y as in fwd.cuh. lse is max_logit + log_sum; see HugeRow for large ones.
//
// Tiling. A work tile is (batch, KV head, 128 keys). Persistent CTAs fetch work tiles from an
// atomic counter and loop over the steps (64 queries of one head of the group) that can see these
// keys. dK and dV stay in registers. dQ is accumulated in float32 in the workspace by global
// reductions. bwd_rows.cuh holds the kernels before and after: delta and lse, and rounding of dQ.
//
// Operand layout. The kernel computes S^T, with keys as the M dimension. The accumulator fragments
// of P^T and dS^T then feed the dV and dK MMAs from registers. The dQ MMA reduces over all 128
// keys, so dS goes through shared memory.
//
// Warpgroups.
//   0, 1  MMA: 64 keys each for P, dS, dK and dV, and half of the columns of dQ
//   2     producer: warp 0 schedules work tiles and steps and issues TMA loads, warps 1-3 build
//         the mask bits of partial tiles (bwd_producer.cuh)
// With up to 128 dims and without biases or a softcap, another MMA warpgroup comes before the
// producer and computes dQ (bwd_dq.cuh). Dims above 192 use yet another division of the work
// (bwd_wide.cuh).
//
// Shared memory for D = E = 128, in blocks of 64 columns (128-byte swizzle; see common/tile.cuh):
//   k, v     128 rows each, 64 KiB for both
//   q, dout  two stages, 32 KiB for each array
//   ds       two stages of 128 keys by 64 queries, 16 KiB each
//   out      1 KiB per warp, staging for dK and dV
//   dq       with the dQ warpgroup: 32 KiB, staging for dQ
//   bias     with biases: two stages of 64 queries by 128 keys, 16 KiB each; their gradients
//            overwrite them (bwd_bias.cuh)
// The rest holds lse, delta, mask bits, descriptions of work tiles and steps, and mbarriers.
#pragma once

#include <type_traits>

#include "common/wgmma.cuh"
#include "masked_attention/bwd_bias.cuh"
#include "masked_attention/bwd_dq.cuh"
#include "masked_attention/bwd_producer.cuh"
#include "masked_attention/bwd_rows.cuh"
#include "masked_attention/bwd_wide.cuh"
#include "masked_attention/scores.cuh"

namespace jax_dsa::masked_attention {

// The main loop of MMA warpgroup `warpgroup`, without a dQ warpgroup.
template <typename Tr>
__device__ void consume(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                        const CUtensorMap& dbias_map, BwdShared<Tr>& shared, int warpgroup) {
  constexpr int kScores = kStepQueries / 2, kSteps = kStepQueries / 16;
  constexpr int kSliceRegisters = Tr::kDqSliceColumns / 2;
  // Recompute thread-dependent indices in every step. Keeping them live would cost registers that
  // the MMA needs.
  const auto lane_now = [] { return thread_index() & 31; };
  const auto row_now = [&](int row) {  // row in the work tile
    return warpgroup * 64 + (thread_index() >> 5 & 3) * 16 + row;
  };
  const float scale_log2 = p.scale * kLog2E;
  const float cap_inverse = Tr::kGeneral && p.softcap > 0.f ? 1.f / p.softcap : 0.f;
  const uint64_t own_keys = k_major_descriptor(smem_address(shared.k) + warpgroup * kBlockBytes);
  const uint64_t own_values = k_major_descriptor(smem_address(shared.v) + warpgroup * kBlockBytes);
  // The descriptor of K restricted to the columns of a dQ slice, from key `key` on.
  const auto slice_keys = [&](int slice, int key) {
    const int column = slice * Tr::kDqSliceColumns;
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

  // Processes one step. Returns whether it is the last one of its work tile.
  const auto step = [&](bool accumulate) {
    const int at = uniform(ring.index);
    const uint32_t q_at = smem_address(shared.q[at]), dout_at = smem_address(shared.dout[at]);
    mbarrier_wait(&shared.q_full[at], ring.parity);
    mbarrier_wait(&shared.step_ready[at], ring.parity);
    const int flags = shared.flags[at];
    const bool partial = flags & kPartial;
    // Keeps ptxas from moving a wait for products up; see bwd_dq.cuh. With biases this costs more
    // than it gains.
    const auto end_block = [&] {
      if constexpr (!Tr::kBias) mbarrier_wait(&shared.q_full[at], ring.parity);
    };

    float s[kScores], dp[kScores];
    if constexpr (!Tr::kGeneral) init_negated(s, shared.lse[at]);
    if constexpr (!Tr::kSerialProducts) init_negated(dp, shared.delta[at]);
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
    if constexpr (!Tr::kSerialProducts) multiply_values();
    if (p.deterministic) publish_pending_add(shared);
    wgmma_wait<Tr::kSerialProducts ? 0 : 1>();
    wgmma_pin(s);

    if constexpr (Tr::kBias) {
      mbarrier_wait(&shared.bias.full[at], ring.parity);
      add_bias<Tr::kType>(s, p.scale, [&](int k, uint32_t (&x)[4]) {
        load_matrix_x4_transposed(bias_fragment(shared.bias, at, warpgroup, p.bias.queries == 1, k),
                                  x);
      });
    }
    if constexpr (Tr::kGeneral) {
      cap_scores(s, Tr::kBias ? 1.f : p.scale, p.softcap, cap_inverse);
    }
    const auto lse_of = [&](int i) {  // lse of the queries of scores i and i + 1
      return *reinterpret_cast<const float2*>(&shared.lse[at][i / 4 * 8 + lane_now() % 4 * 2]);
    };
    const int lane = lane_now();
    const uint32_t own_row = row_now(lane % 16) * 128;
    const auto chunk = [&](int k) { return own_row + ((2 * k + lane / 16) ^ (lane % 8)) * 16; };
    const uint32_t ds_at = smem_address(shared.ds[at]);
    const auto ds_chunk = [&](int k) { return ds_at + chunk(k); };
    const bool capped = Tr::kGeneral && cap_inverse > 0.f;
    // Nobody reads this buffer yet: the barrier of the previous step came after the last read.
    if (capped) store_cap_derivatives<Tr::kType>(s, cap_inverse, ds_chunk);
    const auto first_row = [&] { return row_now(lane_now() / 4); };
    const float to_log2 = apply_flags(flags, s, w, shared, at, first_row, p.scale, scale_log2);
    uint32_t probabilities[kSteps][4], gradients[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 8 * k + 2 * j;
        if constexpr (Tr::kGeneral) {
          const float2 lse = lse_of(i);
          s[i] = exp2_approx(fmaf(s[i], kLog2E, -lse.x));
          s[i + 1] = exp2_approx(fmaf(s[i + 1], kLog2E, -lse.y));
        } else {
          s[i] = exp2_approx(s[i] * to_log2);
          s[i + 1] = exp2_approx(s[i + 1] * to_log2);
        }
        probabilities[k][j] = pack_16<Tr::kType>(s[i], s[i + 1]);
      }
      if constexpr (Tr::kSerialProducts) {
        store_matrix_x4(smem_address(shared.p) + chunk(k), probabilities[k][0], probabilities[k][1],
                        probabilities[k][2], probabilities[k][3]);
      }
    }

    if constexpr (Tr::kSerialProducts) {
      init_negated(dp, shared.delta[at]);
      multiply_values();
    } else {
      wgmma_pin(s);
      wgmma_pin(probabilities);
      end_block();
    }
    wgmma_wait<0>();
    wgmma_pin(dp);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (Tr::kSerialProducts) {
        load_matrix_x4(smem_address(shared.p) + chunk(k), probabilities[k]);
      }
      if (capped) multiply_by_cap_derivatives<Tr::kType>(&dp[8 * k], ds_chunk(k));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 8 * k + 2 * j;
        const float2 x = Tr::kSerialProducts ? unpack_16<Tr::kType>(probabilities[k][j])
                                             : make_float2(s[i], s[i + 1]);
        const float2 ds = score_gradients(x, make_float2(dp[i], dp[i + 1]), partial);
        gradients[k][j] = pack_16<Tr::kType>(ds.x, ds.y);
        if constexpr (Tr::kBias) dp[i] = ds.x, dp[i + 1] = ds.y;
      }
      store_matrix_x4(ds_chunk(k), gradients[k][0], gradients[k][1], gradients[k][2],
                      gradients[k][3]);
      if constexpr (Tr::kBias) {
        if (w.dbias == nullptr) {
          store_matrix_x4_transposed(bias_fragment(shared.bias, at, warpgroup, false, k),
                                     gradients[k][0], gradients[k][1], gradients[k][2],
                                     gradients[k][3]);
        }
      }
    }
    if constexpr (Tr::kBias) {
      if (w.dbias) {
        sum_bias_gradients(p, w.dbias, shared.work_tile.batch, shared.stage[at].head,
                           shared.stage[at].query, shared.work_tile.key + warpgroup * 64, dp);
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
        if constexpr (Tr::kSerialProducts) {
          const uint64_t a = k_major_descriptor(smem_address(shared.p) + warpgroup * kBlockBytes);
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
        if constexpr (Tr::kSerialProducts) {
          const uint64_t a = k_major_descriptor(ds_at + warpgroup * kBlockBytes);
          wgmma_16<Tr::kType, kKMajor, kMNMajor>(dk, a + k * 2, b, k > 0 || accumulate);
        } else {
          wgmma_16<Tr::kType, kMNMajor>(dk, gradients[k], b, k > 0 || accumulate);
        }
      }
      wgmma_commit();
    };
    float dq[kSliceRegisters];
    // Issues the MMA of slice `slice` of dQ over kCount keys from `key` on.
    const auto multiply_keys = [&]<int kCount>(std::integral_constant<int, kCount>, int slice,
                                               int key) {
      const uint64_t a = moved(ds, key * 128), b = slice_keys(slice, key);
#pragma unroll
      for (int k = 0; k < kCount / 16; ++k) {
        wgmma_16<Tr::kType, kMNMajor, kMNMajor>(dq, a + k * (16 * 128 / 16),
                                                b + k * (16 * 128 / 16), k > 0);
      }
      wgmma_commit();
    };
    const auto add_dq_slice = [&](int slice) {
      wgmma_pin(dq);
      add_dq(dq, w.dq, shared.stage[at].step * Tr::kDqSlices + slice);
    };
    const BwdStage& stage = shared.stage[at];
    // Each stage has its own dS buffer. Once both warpgroups reach this barrier, both have finished
    // reading the previous step's dS.
    wgmma_fence();
    if constexpr (!Tr::kSerialProducts) add_to_dv();
    named_barrier_sync<256>(kGradients);
    if constexpr (Tr::kBias) {
      if (thread_index() == 0 && w.dbias == nullptr) {
        store_bias_gradients(dbias_map, shared.bias, at, shared.work_tile.batch,
                             shared.stage[at].head, shared.stage[at].query, shared.work_tile.key);
      }
    }
    if constexpr (Tr::kSerialProducts) {
      // The reductions overlap with the product for dV.
      wgmma_fence();
      multiply_keys(std::integral_constant<int, 64>(), 2, warpgroup * 64);
      add_to_dv();
      if (p.deterministic)
        wait_for_earlier_adds(w, shared, stage.step, 2, 2 * stage.earlier_adds + warpgroup);
      wgmma_wait<1>();
      add_dq_slice(2);
      end_block();
    }
    wgmma_fence();
    multiply_keys(std::integral_constant<int, Tr::kKeys>(), warpgroup, 0);
    add_to_dk();
    if (p.deterministic)
      wait_for_earlier_adds(w, shared, stage.step, warpgroup, stage.earlier_adds);
    wgmma_wait<1>();
    add_dq_slice(warpgroup);
    end_block();
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

  for_each_work_tile(shared, step, [&](const BwdWorkTile& work_tile) {
    if (p.deterministic) publish_pending_add(shared);
    store_dk_dv<Tr::kType>(p, work_tile, dk, dv, row_now(lane_now() / 4), Tr::kKeys, 0, 0,
                           shared.out[thread_index() / 32]);
  });
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    bwd_kernel(const __grid_constant__ MaskedAttentionBwdParams p,
               const __grid_constant__ BwdTileScheduler scheduler,
               const __grid_constant__ BwdWorkspace w, const __grid_constant__ Bounds bounds,
               const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map,
               const __grid_constant__ CUtensorMap dout_map,
               const __grid_constant__ CUtensorMap bias_map,
               const __grid_constant__ CUtensorMap dbias_map) {
  auto& shared = dynamic_shared<BwdShared<Tr>>();
  constexpr int kMaskWarps = kMaskThreads / 32;
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.work_tile_full, 1);
    mbarrier_init(&shared.kv_full, 1);
    mbarrier_init(&shared.kv_cleared, kMaskWarps);
    mbarrier_init(&shared.kv_free, Tr::kThreads / 32 - 4 + kMaskWarps);
    for (int i = 0; i < kDsBuffers; ++i) {
      mbarrier_init(&shared.ds_full[i], 8);
      mbarrier_init(&shared.ds_free[i], 4);
    }
    for (int i = 0; i < Tr::kStages; ++i) {
      mbarrier_init(&shared.stage_described[i], 1);
      mbarrier_init(&shared.q_full[i], 1);
      mbarrier_init(&shared.dout_full[i], 1);
      mbarrier_init(&shared.step_ready[i], kMaskWarps);
      mbarrier_init(&shared.free[i], 8);
    }
    if constexpr (Tr::kBias) {
      for (int i = 0; i < Tr::kBiasBuffers; ++i) {
        mbarrier_init(&shared.bias.full[i], 1);
        mbarrier_init(&shared.bias.free[i], 1);
      }
    }
    for (uint32_t*& counter : shared.pending_add) counter = nullptr;
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup < 2) {
    raise_registers<Tr::kConsumerRegisters>();
    if constexpr (Tr::kDqWarpgroup) {
      consume_keys<Tr>(p, w, shared, warpgroup);
    } else if constexpr (Tr::kWide) {
      consume_wide<Tr>(p, w, dbias_map, shared, warpgroup);
    } else {
      consume<Tr>(p, w, dbias_map, shared, warpgroup);
    }
  } else if (Tr::kDqWarpgroup && warpgroup == 2) {
    if constexpr (Tr::kDqWarpgroup) {
      lower_registers<Tr::kDqRegisters>();
      consume_ds<Tr>(p, w, shared);
    }
  } else {
    lower_registers<Tr::kProducerRegisters>();
    const int thread = threadIdx.x % 128;
    if (thread < 32) {
      load_steps<Tr>(p, scheduler, w, bounds, q_map, k_map, v_map, dout_map, bias_map, shared);
    } else {
      prepare_steps<Tr>(p, w, shared, thread - 32);
    }
  }
}

}  // namespace jax_dsa::masked_attention
