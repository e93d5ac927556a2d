// Sparse MLA, backward. For the slots i of a query and its heads,
//
//     P_i = exp(scale q . k_i - lse)         dS_i = scale P_i (dout . v_i - delta)
//     dq = sum_i dS_i k_i                    dkv[idx_i] += dS_i q, and P_i dout in the values
//
// dq gathers per query and keeps what belongs to 64 heads; dkv scatters, and the fewer reductions
// into global memory the better, so it wants all heads at once. Both do not fit one block. So there
// are two kinds of work items, which run side by side on different multiprocessors, the first bound
// by the tensor cores, the second by the reductions:
//   queries' kind (bwd_queries.cuh): 64 heads of a query: P, dS and dq; P and dS go to memory
//   keys' kind (bwd_keys.cuh): 128 heads of a query, half of the columns: dkv
// A query of up to 64 heads makes a step together with its neighbour: the second kind of item has
// room for both, and the slots of keys that both select come first (bwd_order.cuh), to be reduced
// once. Otherwise a query is a step of its own.
// Persistent blocks take items by tickets, in an order in which a step's items of the second kind
// follow `lag` steps behind those of the first. An item waits only for items of lower tickets:
// for what it reads to be written, and for the place where it writes to have been read, the P and
// dS of `ring` steps having room. So whatever blocks are resident, all waits end.
//
// Warpgroups: two that multiply, one that copies (roles at the top of each kind's file).
// Shared memory, in blocks of 64 rows by 64 columns of bf16 (8 KiB, 128-byte swizzle; see
// common/wgmma.cuh), for D 576:
//   queries' kind   q 9, dout 8, one key tile 9, P and dS of a tile 2: 28 blocks
//   keys' kind      of two head tiles q 5 and dout 4, images of P and dS 4 a warpgroup: 26 blocks
#pragma once

#include "sparse_mla/bwd_keys.cuh"
#include "sparse_mla/bwd_queries.cuh"

namespace jax_dsa::sparse_mla {

template <int kD, bool kRows>
__global__ void __launch_bounds__(kThreads, 1)
    bwd_kernel(const __grid_constant__ SparseMlaBwdParams p) {
  auto& shared = dynamic_shared<BwdShared<kD>>();
  constexpr int kBlocks = kD / 64;
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.rows_full, 128 + 1);
    for (int i = 0; i < kBlocks; ++i) {
      mbarrier_init(&shared.block_full[i], i == block_order(0) ? 128 + 4 : 128);
      mbarrier_init(&shared.block_free[i], 4);
    }
    mbarrier_init(&shared.item_done, kThreads / 32);
    mbarrier_init(&shared.ticket_full, 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&shared.image_full[i], 1);
      mbarrier_init(&shared.image_free[i], 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  auto* const next_ticket = static_cast<uint32_t*>(p.counters);
  const int warpgroup = threadIdx.x / 128;
  // Of rows_full; of the blocks of key tiles; of the images.
  uint32_t item_parity = 0, key_parity = 0, image_parity = 0;

  // Runs the items; `queries` and `keys` are a warpgroup's parts of the two kinds.
  const auto run = [&](auto queries, auto keys) {
    for (uint32_t parity = 0;; parity ^= 1) {
      fence_async_proxy();  // what ordinary accesses touched may next be the target of a copy
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.item_done);
      if (threadIdx.x / 32 == 8) {  // of the warpgroup that is first to be done with an item
        if (threadIdx.x % 32 == 0) {
          const int ticket = static_cast<int>(atomicAdd(next_ticket, 1u));
          mbarrier_wait(&shared.item_done, parity);
          shared.ticket = ticket;
          mbarrier_arrive(&shared.ticket_full);
        }
        __syncwarp();
      }
      mbarrier_wait(&shared.ticket_full, parity);
      const BwdWork work(p);  // not kept in registers meanwhile
      if (shared.ticket >= work.tickets()) return;
      const BwdItem item(work, shared.ticket);
      if (item.keys) {
        keys(work, item);
      } else {
        queries(work, item);
      }
    }
  };
  if (warpgroup < 2) {
    raise_registers<224>();
    run(
        [&](const BwdWork& work, const BwdItem& item) {
          if (warpgroup == 0) {
            make_gradients<kD>(p, work, item, shared, item_parity, key_parity);
          } else {
            sum_gradients<kD>(p, work, item, shared, item_parity);
          }
        },
        [&](const BwdWork& work, const BwdItem& item) {
          consume_keys<kD, kRows>(p, work, item, shared, warpgroup, item_parity, image_parity);
        });
  } else {
    lower_registers<56>();
    run([&](const BwdWork& work,
            const BwdItem& item) { produce_queries<kD>(p, work, item, shared, key_parity); },
        [&](const BwdWork& work, const BwdItem& item) {
          produce_keys<kD>(p, work, item, shared, image_parity);
        });
  }
}

}  // namespace jax_dsa::sparse_mla
