// Sparse MLA, backward pass. For each query, its heads, and its slots i:
//
//   P_i  = exp((scale * q . k_i - max_logit) - log_sum)      delta = sum(out * dout) - dlse
//   dS_i = scale * P_i * (dout . v_i - delta)
//   dq   = sum_i dS_i k_i                              dkv[idx_i] += dS_i q, and P_i dout in the
//   values
//
// dq is gathered per query, and its MMA needs the operands of 64 heads. dkv is scattered with
// atomic reductions into global memory, and since these limit its speed, all heads should be summed
// first. One CTA cannot hold the operands of both. So there are two kinds of work tiles, which run
// at the same time on different SMs. The first is bound by the tensor cores, the second by the
// reductions.
//
//   row               A query and a KV head group. ("Stored rows" are something else, see below.)
//   step              Two neighbouring rows if a row has one head tile (up to 64 heads), else one
//   row. P tile, dS tile   P or dS of a head tile and a key tile (64 slots). They lie in the
//   workspace as
//                     they lie in shared memory.
//   dQ tile           A work tile that computes P, dS and dq of one head tile and writes its P and
//   dS
//                     tiles (bwd_dq.cuh).
//   dKV tile          A work tile that computes dkv of two head tiles, for one half of the columns
//   and
//                     one KV partition, from their P and dS tiles (bwd_dkv.cuh).
//   KV partition      Some of the key tiles of a step. If dkv exceeds what the L2 keeps, a step has
//                     several partitions, and the same partition of neighbouring steps is processed
//                     one after the other. Where slots are in the order of their keys, as top-k
//                     returns them, these reduce into the same range of dkv.
//   tile index        The number of a work tile, from an atomic counter.
//   scheduling group  The dQ tiles of one step, then as many dKV tiles as a step has. These are of
//                     steps that are about `lag` earlier.
//   ring              The space for P and dS tiles, which holds those of 2 * `lag` steps.
//   packed queries    Neighbouring queries of few heads that are processed as one query of up to 64
//                     heads (bwd_pack.cuh).
//
// The two rows of a step have the slots of their common keys first (bwd_order.cuh). The gradients
// of these keys are summed over both rows and reduced once. With `by_rows` nothing is reduced: the
// sums of each slot are stored ("stored rows") and then added in a fixed order (sum_rows.cu).
// docs/design/sparse_mla.md has an example in numbers.
//
// Deadlocks are impossible. CTAs take work tiles in the order of tile indices, and a work tile
// waits only until its P and dS tiles are written, or until their space in the ring has been read.
// Work tiles with lower indices do both. So CTAs need not be resident at the same time.
//
// Warpgroups.
//   0, 1  MMA, with roles that depend on the kind of work tile (see bwd_dq.cuh and bwd_dkv.cuh)
//   2     producer: fetches work tiles and copies their operands
//
// Shared memory, in blocks of 64 rows by 64 columns of bf16 (8 KiB, 128-byte swizzle; see
// common/tile.cuh), for D = 576:
//   dQ tile   q 9, dout 8, one key tile 9, its P and dS 2: 28 blocks
//   dKV tile  of two head tiles q 5 and dout 4 each, P and dS tiles 4 per warpgroup: 26 blocks
// q and dout of a work tile are copied while the previous work tile is finishing.
#pragma once

#include "common/limits.h"
#include "sparse_mla/bwd_dkv.cuh"
#include "sparse_mla/bwd_dq.cuh"

namespace jax_dsa::sparse_mla {

template <int kD, bool kRows, bool kPacked>
__global__ void __launch_bounds__(kThreads, 1)
    bwd_kernel(const __grid_constant__ SparseMlaBwdParams p, const __grid_constant__ BwdWork work) {
  constexpr int kConsumer = 224, kProducer = 56;
  static_assert(registers_fit(1, 2, kConsumer, kProducer));
  auto& shared = dynamic_shared<BwdShared<kD>>();
  constexpr int kBlocks = kD / 64;
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.rows_full, 128 + 1);
    for (int i = 0; i < kBlocks; ++i) {
      mbarrier_init(&shared.block_full[i], i == block_order(0) ? 128 + 4 : 128);
      mbarrier_init(&shared.block_free[i], 4);
    }
    mbarrier_init(&shared.work_tile_done, 8);
    mbarrier_init(&shared.operand_free, 4);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&shared.work_tile_full[i], 1);
      mbarrier_init(&shared.p_ds_full[i], 1);
      mbarrier_init(&shared.p_ds_free[i], 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  uint32_t rows_parity = 0, key_parity = 0, p_ds_parity = 0;

  // The producer fetches the next work tile once it has issued all copies of the current one. It
  // copies the next q and dout while the current work tile is finishing. At that time the MMAs of a
  // dKV tile have read their q and dout, and those of a dQ tile have read them once the last scores
  // are computed (`operand_free`). Copies to memory that is read until the end wait for
  // `work_tile_done`.
  if (warpgroup == 2) {
    lower_registers<kProducer>();
    uint32_t operand_parity = 0;
    bool after_dq = false;
    for (uint32_t n = 0;; ++n) {
      const uint32_t parity = n % 2;
      if (threadIdx.x % 128 == 0) {
        shared.work_tile[parity] =
            BwdWorkTile(work, atomicAdd(static_cast<uint32_t*>(p.counters), 1u));
        mbarrier_arrive(&shared.work_tile_full[parity]);
      }
      __syncwarp();
      mbarrier_wait(&shared.work_tile_full[parity], n / 2 % 2);
      const BwdWorkTile work_tile = shared.work_tile[parity];
      if (work_tile.over) return;
      // No warp may be one work tile behind the others. Their copies for the new one would count as
      // arrivals of the slow warp at `rows_full` for the old one, and it could miss a phase of
      // `work_tile_done`.
      named_barrier_sync<128>(kWorkTileTaken);
      if (after_dq) {
        mbarrier_wait(&shared.operand_free, operand_parity);
        operand_parity ^= 1;
      }
      const auto wait_for_previous_tile = [&] { mbarrier_wait(&shared.work_tile_done, parity); };
      if (work_tile.is_dkv) {
        produce_dkv<kD>(p, work, work_tile, shared, p_ds_parity, wait_for_previous_tile);
      } else {
        produce_dq<kD, kPacked>(p, work, work_tile, shared, key_parity, wait_for_previous_tile);
      }
      after_dq = !work_tile.is_dkv;
    }
  }
  raise_registers<kConsumer>();
  for (uint32_t n = 0;; ++n) {
    fence_async_proxy();  // copies may now overwrite what these threads accessed
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.work_tile_done);
    mbarrier_wait(&shared.work_tile_full[n % 2], n / 2 % 2);
    const BwdWorkTile work_tile = shared.work_tile[n % 2];
    if (work_tile.over) return;
    if (work_tile.is_dkv) {
      consume_dkv<kD, kRows, kPacked>(p, work, work_tile, shared, warpgroup, rows_parity,
                                      p_ds_parity);
    } else if (warpgroup == 0) {
      compute_p_ds<kD, kPacked>(p, work, work_tile, shared, rows_parity, key_parity);
    } else {
      accumulate_dq<kD>(p, work, work_tile, shared, rows_parity);
    }
  }
}

}  // namespace jax_dsa::sparse_mla
