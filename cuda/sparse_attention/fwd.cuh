// Sparse attention, forward pass: the mathematics of masked attention's forward kernel, over the
// keys of the blocks that a query's KV head lists.
//
// Tiling. A work tile is (batch, KV head, a few neighbouring queries); its 128 MMA rows are the
// heads of the KV head for each query. It walks over the union of the lists of its queries, which
// lists.cuh describes, in steps of 128 keys (64 where values are wide). A key block is thus loaded
// once for all queries of the tile.
//
// Warpgroups.
//   0, 1  MMA: 64 rows each, as in masked attention
//   2     producer: warp 0 schedules tiles, warp 1 loads the keys of a step, a box for each block,
//         warps 2 and 3 make one bit per query and key
#pragma once

#include "masked_attention/fwd_consumer.cuh"
#include "sparse_attention/fwd_plan.cuh"
#include "sparse_attention/producer.cuh"

namespace jax_dsa::sparse_attention {

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdCall p,
               const __grid_constant__ masked_attention::TileScheduler scheduler,
               const __grid_constant__ TileLists lists, unsigned* tile_counter,
               const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map) {
  auto& shared = dynamic_shared<masked_attention::Shared<Tr>>();
  // Rows of the tile beyond its queries are never loaded.
  clear_shared(shared.q);
  if (threadIdx.x == 0) {
    init_barriers<Tr>(p, shared);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup < 2) {
    raise_registers<Tr::kConsumerRegisters>();
    // One code for both warpgroups, because with two the code of all warps together does not fit in
    // the instruction cache.
    masked_attention::consume<Tr, masked_attention::kEither>(p, shared);
  } else {
    lower_registers<Tr::kProducerRegisters>();
    produce_steps<Tr>(p, scheduler, lists, tile_counter, shared,
                      BlockLoader<Tr, FwdCall>{p, q_map, k_map, v_map, shared});
  }
}

}  // namespace jax_dsa::sparse_attention
