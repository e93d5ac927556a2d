// dQ of sparse attention, with instructions of sm_80. bwd_dq.cuh has the mathematics.
//
// Tiling. Work tiles and steps are those of the forward pass (portable_fwd.cuh), with 32 keys, and
// half of the rows where dims exceed 128. dQ stays in registers, and so do P and dS.
//
// Pipeline. If 99 KiB have room for two stages of keys and values, the copies of the next step are
// issued before the products of a step, otherwise after them. Two CTAs share an SM of GPUs with 227
// KiB.
//
// Shared memory for D = E = 128: Q, dO 64 KiB; K, V 16 KiB; bits and row sums 3 KiB.
#pragma once

#include "sparse_attention/bwd_rows.cuh"
#include "sparse_attention/portable_steps.cuh"

namespace jax_dsa::sparse_attention {

using PortableDqCall = TileCall<SparseAttentionBwdParams>;

// What the backward pass subtracts in a row. All are 0 for a row that sees no key.
struct PortableRowSums {
  float max_logit, log_sum, delta;

  __device__ float probability(float score, float scale) const {
    return exp2_approx((__fmul_rn(score, scale) - max_logit - log_sum) * kLog2E);
  }
};

template <DType kType, int kD, int kE>
struct PortableDqTraits : PortableTraits<kType, kD, kE, kD <= 128 ? 2 : 1, 32> {
  static constexpr int kStages = kD == 64 || kD == 192 ? 2 : 1;
};

template <typename Tr>
struct alignas(128) PortableDqShared {
  uint8_t q[Tr::kDBlocks][Tr::kRows * 128];  // then dQ
  uint8_t dout[Tr::kEBlocks][Tr::kRows * 128];
  uint8_t k[Tr::kStages][Tr::kDBlocks][Tr::kKeys * 128];
  uint8_t v[Tr::kStages][Tr::kEBlocks][Tr::kKeys * 128];
  PortableRowSums sums[Tr::kRows];
  StepBits<Tr> steps;
};

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 2)
    portable_dq_kernel(const __grid_constant__ PortableDqCall p,
                       const __grid_constant__ masked_attention::TileScheduler scheduler,
                       const __grid_constant__ TileLists lists, const float* delta) {
  constexpr int kM = Tr::kRowTiles, kScores = Tr::kKeys / 2;
  constexpr DType kType = Tr::kType;
  auto& shared = dynamic_shared<PortableDqShared<Tr>>();
  StepWalk<Tr, PortableDqCall> walk(p, scheduler, lists, shared.steps);
  const int steps = walk.step_count(), lane = threadIdx.x % 32;
  const int warp_row = uniform(threadIdx.x / 32) * Tr::kWarpRows;
  const uint32_t q_tile = smem_address(shared.q), dout_tile = smem_address(shared.dout);
  // Issues the copies of the current step (kNext = 0), or of the next one.
  const auto load = [&]<int kNext>(int step) {
    const int stage = step % Tr::kStages;
    walk.template load<kNext, Tr::kDBlocks>(smem_address(shared.k[stage]), p.k, p.dim, step);
    walk.template load<kNext, Tr::kEBlocks>(smem_address(shared.v[stage]), p.v, p.value_dim, step);
  };
  load_rows<Tr, Tr::kDBlocks>(walk, q_tile, p.q, p.dim);
  load_rows<Tr, Tr::kEBlocks>(walk, dout_tile, p.dout, p.value_dim);
  if (const int row = threadIdx.x; row < Tr::kRows) {
    PortableRowSums x = {0.f, 0.f, 0.f};
    if (row < walk.rows()) {
      const int64_t at = walk.row_index(row);
      x = {p.max_logit[at], p.log_sum[at], delta[at]};
      if (x.max_logit == -INFINITY) x = {0.f, 0.f, 0.f};
    }
    shared.sums[row] = x;
  }
  if (steps > 0) {
    walk.build_bits(0), walk.build_bits(1);
    __syncthreads();
    load.template operator()<0>(0);
  }

  float dq[kM][Tr::kD / 2];
  clear_fragments(dq);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait();
    __syncthreads();
    if (Tr::kStages == 2 && step + 1 < steps) load.template operator()<1>(step + 1);
    const int stage = step % Tr::kStages;
    const uint32_t k_tile = smem_address(shared.k[stage]), v_tile = smem_address(shared.v[stage]);
    float s[kM][kScores], dp[kM][kScores];
    clear_fragments(s);
    multiply_tiles<kType, Tr::kD / 16>(s, Operand<Side::kA, false, Tr::kRows>(q_tile, warp_row, 0),
                                       Operand<Side::kB, false, Tr::kKeys>(k_tile, 0, 0));
    walk.build_bits(step + 2);
    clear_fragments(dp);
    multiply_tiles<kType, Tr::kE / 16>(dp,
                                       Operand<Side::kA, false, Tr::kRows>(dout_tile, warp_row, 0),
                                       Operand<Side::kB, false, Tr::kKeys>(v_tile, 0, 0));
    uint32_t ds[kM][Tr::kKeys / 16][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const int row = warp_row + m * 16 + lane / 4;
      walk.mask(s[m], step, row);
      const PortableRowSums sums[2] = {shared.sums[row], shared.sums[row + 8]};
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const PortableRowSums& x = sums[i / 2 % 2];
        const float probability = x.probability(s[m][i], p.scale);
        // dP is undefined where a key is hidden.
        s[m][i] = probability == 0.f ? 0.f : probability * (dp[m][i] - x.delta);
      }
    }
    pack_fragments<kType>(s, ds);
    multiply_tiles<kType, Tr::kKeys / 16>(dq, RegisterOperand<kM, Tr::kKeys / 16>{ds},
                                          Operand<Side::kB, true, Tr::kKeys>(k_tile, 0, 0));
    if (Tr::kStages == 1) {
      __syncthreads();
      if (step + 1 < steps) load.template operator()<1>(step + 1);
    }
    walk.advance(step + 2);
  }

  cp_async_wait();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    store_fragment<kType, Tr::kRows, Tr::kD / 2>(q_tile, warp_row + m * 16, 0,
                                                 [&](int i) { return dq[m][i] * p.scale; });
  }
  __syncwarp();
  store_rows<Tr, Tr::kDBlocks>(walk, q_tile, warp_row, p.dq, p.dim);
}

}  // namespace jax_dsa::sparse_attention
