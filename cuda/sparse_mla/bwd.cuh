// Sparse MLA, backward. For the slots i of a query and its heads,
//
//     P_i = exp(scale q . k_i - lse)         dS_i = scale P_i (dout . v_i - delta)
//     dq = sum_i dS_i k_i                    dkv[idx_i] += dS_i q, and P_i dout in the values
//
// dq gathers per query and keeps what belongs to 64 heads; dkv scatters, and the fewer reductions
// into global memory the better, so it wants all heads at once. Both do not fit one block. So there
// are two kinds of work items, which run side by side on different SMs, the first bound
// by the tensor cores, the second by the reductions. The words:
//   row      a query and group of keys
//   step     two neighbouring rows of one head tile (up to 64 heads) each, or one row of more
//   source   a head tile of a step
//   image    P or dS of a source and a tile of 64 slots, in memory as it lies in shared memory
//   item     what a block does at a time, of the
//              queries' kind (bwd_queries.cuh): P, dS and dq of a source; writes its images
//              keys' kind (bwd_keys.cuh): dkv of two sources, half of the columns, one window
//   part     which of its step's an item is: the source; or the pair of sources and the half
//   window   a part of a step's tiles of slots. If dkv exceeds what the L2 keeps, a step has
//            several, and the same windows of neighbouring steps follow each other: where slots are
//            in the order of their keys, as top-k's are, those reduce into the same part of dkv
//   ticket   an item's number, in the order in which persistent blocks take items
//   turn     of the tickets: the queries' kind of one step, then as many items of the keys' kind as
//            a step has, of steps about `lag` before
//   ring     the room for images, of 2 `lag` steps
//   packed   neighbouring queries of few heads that are one query of up to 64 (bwd_pack.cuh)
// The two rows of a step have the slots of keys that both select first (bwd_order.cuh), which are
// reduced once for both. With `by_rows` nothing is reduced: sums of slots are stored (as "rows" of
// their own) and then added in a fixed order (sum_rows.cuh). docs/design/sparse_mla.md has an
// example in numbers.
//
// Deadlock-free: blocks take tickets in order, and an item waits only for its images to be written
// or for its place in the ring to have been read, both by lower tickets. Blocks need not be
// resident at the same time.
//
// Warpgroups: two that multiply, one that copies (roles at the top of each kind's file).
// Shared memory, in blocks of 64 rows by 64 columns of bf16 (8 KiB, 128-byte swizzle; see
// common/tile.cuh), for D 576:
//   queries' kind   q 9, dout 8, one key tile 9, P and dS of a tile 2: 28 blocks
//   keys' kind      of two head tiles q 5 and dout 4, images of P and dS 4 a warpgroup: 26 blocks
// q and dout of any item come while the item before is at its end.
#pragma once

#include "common/limits.h"
#include "sparse_mla/bwd_keys.cuh"
#include "sparse_mla/bwd_queries.cuh"

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
    mbarrier_init(&shared.item_done, 8);
    mbarrier_init(&shared.operand_free, 4);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&shared.item_full[i], 1);
      mbarrier_init(&shared.image_full[i], 1);
      mbarrier_init(&shared.image_free[i], 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  // Of rows_full; of the blocks of key tiles; of the images.
  uint32_t item_parity = 0, key_parity = 0, image_parity = 0;

  // The warpgroup that copies takes the next item when it has copied all of this one, and copies q
  // and dout while this one ends: the products of the keys' kind have read theirs by then, those of
  // the queries' kind when the last scores are made. What goes where this item still reads waits
  // until it is over.
  if (warpgroup == 2) {
    lower_registers<kProducer>();
    uint32_t queries_parity = 0;
    bool queries = false;
    for (uint32_t n = 0;; ++n) {
      const uint32_t parity = n % 2;
      if (threadIdx.x % 128 == 0) {
        shared.item[parity] = BwdItem(work, atomicAdd(static_cast<uint32_t*>(p.counters), 1u));
        mbarrier_arrive(&shared.item_full[parity]);
      }
      __syncwarp();
      mbarrier_wait(&shared.item_full[parity], n / 2 % 2);
      const BwdItem item = shared.item[parity];
      if (item.over) return;
      // No warp may be an item behind: others' copies for this one would count as its arrivals at
      // `rows_full` for the last one, and it could miss a phase of `item_done`.
      named_barrier_sync<128>(kItemTaken);
      if (queries) {
        mbarrier_wait(&shared.operand_free, queries_parity);
        queries_parity ^= 1;
      }
      const auto wait_for_last = [&] { mbarrier_wait(&shared.item_done, parity); };
      if (item.keys) {
        produce_keys<kD>(p, work, item, shared, image_parity, wait_for_last);
      } else {
        produce_queries<kD, kPacked>(p, work, item, shared, key_parity, wait_for_last);
      }
      queries = !item.keys;
    }
  }
  raise_registers<kConsumer>();
  for (uint32_t n = 0;; ++n) {
    fence_async_proxy();  // what ordinary accesses touched may next be the target of a copy
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.item_done);
    mbarrier_wait(&shared.item_full[n % 2], n / 2 % 2);
    const BwdItem item = shared.item[n % 2];
    if (item.over) return;
    if (item.keys) {
      consume_keys<kD, kRows, kPacked>(p, work, item, shared, warpgroup, item_parity, image_parity);
    } else if (warpgroup == 0) {
      make_gradients<kD, kPacked>(p, work, item, shared, item_parity, key_parity);
    } else {
      sum_gradients<kD>(p, work, item, shared, item_parity);
    }
  }
}

}  // namespace jax_dsa::sparse_mla
