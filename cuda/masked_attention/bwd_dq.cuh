// The MMA warpgroups of the masked attention backward kernel for up to 128 dims and plain scores:
// two for P, dS, dK and dV (64 keys each), and a third for dQ of all 128 keys. See bwd.cuh.
//
// Between a step's products, a warpgroup computes exponentials or waits for its results. The tensor
// cores then work for the other two. They hand over dS in two buffers and never wait for each other
// otherwise.
//
// Order of waits. Within a basic block, ptxas moves the wait for a product up, above all work that
// does not depend on the product. The product and this work would then run one after the other. A
// wait for an mbarrier is a loop, which ends the basic block. Where nothing else does, the code
// below waits again for a phase that has already completed.
#pragma once

#include "common/wgmma.cuh"
#include "masked_attention/bwd_rows.cuh"
#include "masked_attention/scores.cuh"

namespace jax_dsa::masked_attention {

// The main loop of MMA warpgroup `warpgroup` (0 or 1): P and dS of 64 keys, dK and dV.
template <typename Tr>
__device__ void consume_keys(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                             BwdShared<Tr>& shared, int warpgroup) {
  constexpr int kScores = kStepQueries / 2, kSteps = kStepQueries / 16;
  // Whether the scores of the next step are computed beside dK. With 128 dims this gains nothing,
  // because products take longer there, and it costs 4 % where the producer builds many mask bits.
  constexpr bool kScoresAhead = Tr::kD <= 64;
  // Recompute thread-dependent indices in every step. Keeping them live would cost registers that
  // the MMA needs.
  const auto lane_now = [] { return thread_index() & 31; };
  const auto row_now = [&](int row) {  // row in the work tile
    return warpgroup * 64 + (thread_index() >> 5 & 3) * 16 + row;
  };
  const float scale_log2 = p.scale * kLog2E;
  const uint64_t own_keys = k_major_descriptor(smem_address(shared.k) + warpgroup * kBlockBytes);
  const uint64_t own_values = k_major_descriptor(smem_address(shared.v) + warpgroup * kBlockBytes);

  float dk[Tr::kD / 2], dv[Tr::kE / 2];
  RingPlace<Tr::kStages> ring;
  RingPlace<kDsBuffers> ds_ring = {0, 1};

  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane_now() == 0) mbarrier_arrive(barrier);
  };

  float s[kScores];
  // Issues the product for the scores of the next step.
  const auto start_scores = [&] {
    const int at = uniform(ring.index);
    mbarrier_wait(&shared.q_full[at], ring.parity);
    mbarrier_wait(&shared.step_ready[at], ring.parity);
    const uint64_t q = k_major_descriptor(smem_address(shared.q[at]));
    wgmma_forget(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kD / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(
          s, own_keys + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
          q + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2, i > 0);
    }
    wgmma_commit();
  };

  // Processes one step. Returns whether it is the last one of its work tile. If kScoresAhead, its
  // scores have been started before, and it starts those of the next step.
  const auto step = [&](bool accumulate) {
    if constexpr (!kScoresAhead) start_scores();
    const int at = uniform(ring.index), ds_at = uniform(ds_ring.index);
    const uint32_t q_at = smem_address(shared.q[at]), dout_at = smem_address(shared.dout[at]);
    const int flags = shared.flags[at];
    // Returns the values of the queries of scores i and i + 1.
    const auto of_queries = [&](const float (&x)[kStepQueries], int i) {
      return *reinterpret_cast<const float2*>(&x[i / 4 * 8 + lane_now() % 4 * 2]);
    };

    const uint64_t dout = k_major_descriptor(dout_at);
    wgmma_wait<0>();
    wgmma_pin(s);

    const auto first_row = [&] { return row_now(lane_now() / 4); };
    const float to_log2 = apply_flags(flags, s, w, shared, at, first_row, p.scale, scale_log2);
    uint32_t packed[kSteps][4];  // P, then dS
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const float2 lse = of_queries(shared.lse[at], i);
      packed[i / 8][i / 2 % 4] = pack_16<Tr::kType>(exp2_approx(fmaf(s[i], to_log2, -lse.x)),
                                                    exp2_approx(fmaf(s[i + 1], to_log2, -lse.y)));
    }
    wgmma_pin(packed);
    mbarrier_wait(&shared.dout_full[at], ring.parity);  // also ends the basic block
    // dP takes the registers of the scores. ptxas would give it others if it knew that the first
    // product does not add to them, and there are none.
    float (&dp)[kScores] = s;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tr::kE / 16; ++i) {
      wgmma_16<Tr::kType, kKMajor, kKMajor>(
          dp, own_values + i / 4 * (Tr::kKeyBlockBytes / 16) + i % 4 * 2,
          dout + i / 4 * (Tr::kQBlockBytes / 16) + i % 4 * 2, i > 0 || p.dim < 0);
    }
    wgmma_commit();
    const uint64_t dout_rows = mn_major_descriptor(dout_at, Tr::kQBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_16<Tr::kType, kMNMajor>(dv, packed[k], dout_rows + k * (16 * 128 / 16),
                                    k > 0 || accumulate);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(dp);
    wgmma_pin(dv);

    if (flags & kPartial) {  // dP of hidden scores is undefined, and 0 * NaN is NaN
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const float2 x = unpack_16<Tr::kType>(packed[i / 8][i / 2 % 4]);
        dp[i] = x.x == 0.f ? 0.f : dp[i], dp[i + 1] = x.y == 0.f ? 0.f : dp[i + 1];
      }
    }
    mbarrier_wait(&shared.ds_free[ds_at], ds_ring.parity);
    const int lane = lane_now();
    const uint32_t ds_row = smem_address(shared.ds[ds_at]) + row_now(lane % 16) * 128;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 8 * k + 2 * j;
        const float2 delta = of_queries(shared.delta[at], i);
        const float2 x = unpack_16<Tr::kType>(packed[k][j]);
        packed[k][j] = pack_16<Tr::kType>(x.x * (dp[i] - delta.x), x.y * (dp[i + 1] - delta.y));
      }
      store_matrix_x4(ds_row + ((2 * k + lane / 16) ^ (lane % 8)) * 16, packed[k][0], packed[k][1],
                      packed[k][2], packed[k][3]);
    }
    fence_async_proxy();
    wgmma_pin(packed);
    const uint64_t q_rows = mn_major_descriptor(q_at, Tr::kQBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_16<Tr::kType, kMNMajor>(dk, packed[k], q_rows + k * (16 * 128 / 16),
                                    k > 0 || accumulate);
    }
    wgmma_commit();
    const bool last = shared.stage[at].last;
    if (thread_index() == 0) {
      const BwdStage& stage = shared.stage[at];
      shared.ds_description[ds_at] = {stage.step, stage.earlier_adds, last};
    }
    arrive(&shared.ds_full[ds_at]);
    const uint32_t parity = ring.parity;
    ds_ring.advance();
    ring.advance();
    if (kScoresAhead && !last) {
      start_scores();
      wgmma_wait<1>();
    } else {
      mbarrier_wait(&shared.q_full[at], parity);  // ends the basic block
      wgmma_wait<0>();
    }
    wgmma_pin(dk);
    wgmma_pin(dv);
    arrive(&shared.free[at]);
    return last;
  };

  const auto begin = [&] {
    if constexpr (kScoresAhead) start_scores();
  };
  const auto store = [&](const BwdWorkTile& work_tile) {
    store_dk_dv<Tr::kType>(p, work_tile, dk, dv, row_now(lane_now() / 4), Tr::kKeys, 0, 0,
                           shared.out[thread_index() / 32]);
  };
  for_each_work_tile(shared, step, store, begin);
}

// The main loop of the warpgroup that multiplies dS by K, one column slice after the other. Its
// bulk reductions add to dQ in global memory.
template <typename Tr>
__device__ void consume_ds(const MaskedAttentionBwdParams& p, const BwdWorkspace& w,
                           BwdShared<Tr>& shared) {
  constexpr int kSliceRegisters = Tr::kDqSliceColumns / 2, kWarpFloats = kSliceRegisters * 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  RingPlace<kDsBuffers> ring;
  const auto step = [&](bool) {
    const int at = uniform(ring.index);
    mbarrier_wait(&shared.ds_full[at], ring.parity);
    const DsDescription description = shared.ds_description[at];
    uint32_t* const counter = w.add_counts + description.step * (kMaxDqSlices * 4) + warp;
    const uint64_t ds = mn_major_descriptor(smem_address(shared.ds[at]), sizeof(shared.ds[0]));
#pragma unroll
    for (int slice = 0; slice < Tr::kDqSlices; ++slice) {
      const uint64_t keys = mn_major_descriptor(smem_address(shared.k[slice]), Tr::kKeyBlockBytes);
      float dq[kSliceRegisters];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Tr::kKeys / 16; ++k) {
        const uint64_t next = k * (16 * 128 / 16);
        wgmma_16<Tr::kType, kMNMajor, kMNMajor>(dq, ds + next, keys + next, k > 0);
      }
      wgmma_commit();
      uint8_t* const stage = shared.dq[slice][warp];
      if (lane == 0) {
        bulk_wait_read<Tr::kDqSlices - 1>();
        // Deterministic sums: this warp adds after those of all earlier work tiles.
        if (p.deterministic && slice == 0) counter_wait(counter, description.earlier_adds);
      }
      wgmma_wait<0>();
      wgmma_pin(dq);
      __syncwarp();
      if (slice == Tr::kDqSlices - 1 && lane == 0) mbarrier_arrive(&shared.ds_free[at]);
#pragma unroll
      for (int i = 0; i < kSliceRegisters; i += 4) {
        const uint32_t x[4] = {__float_as_uint(dq[i]), __float_as_uint(dq[i + 1]),
                               __float_as_uint(dq[i + 2]), __float_as_uint(dq[i + 3])};
        store_shared_16(smem_address(stage) + (i * 8 + lane) * 16, x);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        const int64_t index = description.step * Tr::kDqSlices + slice;
        bulk_add(w.dq + (index * 4 + warp) * kWarpFloats, stage, kWarpFloats * 4);
        bulk_commit();
      }
    }
    if (p.deterministic && lane == 0) {
      bulk_wait();
      counter_add(counter);
    }
    ring.advance();
    return description.last;
  };
  for_each_work_tile(shared, step, [](const BwdWorkTile&) {});
  if (lane == 0) bulk_wait();
}

}  // namespace jax_dsa::masked_attention
