// Sparse attention, forward pass, with instructions of sm_80.
//
// Tiling. Work tiles and steps are those of fwd.cuh: the rows are the heads of a KV head for a few
// neighbouring queries, which walk over the union of their lists. A CTA has four warps with 32 of
// the 128 rows each. With 256 dims it has half of the rows, 16 per warp.
//
// Pipeline. A tile of keys and a tile of values are in shared memory. The values of a step are
// copied while its scores are multiplied, and the keys of the next step while its values are. Two
// CTAs share an SM, so that one computes its softmax while the other multiplies.
//
// Shared memory for D = E = 128: Q 32 KiB, K and V 16 KiB each, bits 3 KiB.
#pragma once

#include "sparse_attention/portable_steps.cuh"

namespace jax_dsa::sparse_attention {

using PortableFwdCall = TileCall<SparseAttentionFwdParams>;

template <typename Tr>
struct alignas(128) PortableFwdShared {
  uint8_t q[Tr::kDBlocks][Tr::kRows * 128];  // then the output
  uint8_t k[Tr::kDBlocks][Tr::kKeys * 128];
  uint8_t v[Tr::kEBlocks][Tr::kKeys * 128];
  StepBits<Tr> steps;
};

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 2)
    portable_fwd_kernel(const __grid_constant__ PortableFwdCall p,
                        const __grid_constant__ masked_attention::TileScheduler scheduler,
                        const __grid_constant__ TileLists lists) {
  constexpr int kM = Tr::kRowTiles;
  constexpr DType kType = Tr::kType;
  auto& shared = dynamic_shared<PortableFwdShared<Tr>>();
  StepWalk<Tr, PortableFwdCall> walk(p, scheduler, lists, shared.steps);
  const int steps = walk.step_count(), lane = threadIdx.x % 32;
  const int warp_row = uniform(threadIdx.x / 32) * Tr::kWarpRows;
  const uint32_t q_tile = smem_address(shared.q), k_tile = smem_address(shared.k);
  const uint32_t v_tile = smem_address(shared.v);
  load_rows<Tr, Tr::kDBlocks>(walk, q_tile, p.q, p.dim);
  if (steps > 0) {
    walk.build_bits(0), walk.build_bits(1);
    __syncthreads();
    walk.template load<0, Tr::kDBlocks>(k_tile, p.k, p.dim, 0);
  }

  const masked_attention::ScoreUnits<false> units(p.scale);
  float o[kM][Tr::kE / 2];
  clear_fragments(o);
  masked_attention::RowState rows[kM];
#pragma unroll
  for (int m = 0; m < kM; ++m) rows[m] = {{-INFINITY, -INFINITY}, -INFINITY, {0.f, 0.f}, false};

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait();
    __syncthreads();
    walk.template load<0, Tr::kEBlocks>(v_tile, p.v, p.value_dim, step);
    float s[kM][Tr::kKeys / 2];
    clear_fragments(s);
    multiply_tiles<kType, Tr::kD / 16>(s, Operand<Side::kA, false, Tr::kRows>(q_tile, warp_row, 0),
                                       Operand<Side::kB, false, Tr::kKeys>(k_tile, 0, 0));
    walk.build_bits(step + 2);
    uint32_t probabilities[kM][Tr::kKeys / 16][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      walk.mask(s[m], step, warp_row + m * 16 + lane / 4);
      float factor[2];
      if (masked_attention::softmax(s[m], units, rows[m], factor)) {
#pragma unroll
        for (int i = 0; i < Tr::kE / 2; ++i) o[m][i] *= factor[i / 2 % 2];
      }
    }
    pack_fragments<kType>(s, probabilities);
    cp_async_wait();
    __syncthreads();
    if (step + 1 < steps) {
      walk.template load<1, Tr::kDBlocks>(k_tile, p.k, p.dim, step + 1);
    }
    walk.advance(step + 2);
    multiply_tiles<kType, Tr::kKeys / 16>(o, RegisterOperand<kM, Tr::kKeys / 16>{probabilities},
                                          Operand<Side::kB, true, Tr::kKeys>(v_tile, 0, 0));
  }

  cp_async_wait();
  __syncthreads();  // a tile without keys has not waited for its copies of Q
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const int row = warp_row + m * 16 + lane / 4;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = row + r * 8 < walk.rows();
      const int64_t at = exists ? walk.row_index(row + r * 8) : 0;
      const float* const sink =
          p.sinks ? p.sinks + walk.batch() * p.sinks_stride + at % p.heads : nullptr;
      const auto result = masked_attention::row_result(rows[m], units, r, steps > 0, sink);
      factor[r] = result.factor;
      if (exists && lane % 4 == 0) {
        p.max_logit[at] = result.max_logit;
        p.log_sum[at] = result.log_sum;
      }
    }
    store_fragment<kType, Tr::kRows, Tr::kE / 2>(q_tile, warp_row + m * 16, 0, [&](int i) {
      return scale_output(o[m][i], factor[i / 2 % 2]);
    });
  }
  __syncwarp();
  store_rows<Tr, Tr::kEBlocks>(walk, q_tile, warp_row, p.out, p.value_dim);
}

}  // namespace jax_dsa::sparse_attention
