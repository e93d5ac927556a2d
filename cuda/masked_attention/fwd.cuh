// Masked attention, forward pass.
//
//   x   = scale * q . k + bias           y = softcap * tanh(x / softcap), or x without softcap
//   max_logit = max over visible keys of y
//   log_sum   = log sum over visible keys of exp(y - max_logit)
//   out = sum over visible keys of exp(y - max_logit - log_sum) * v, times the sink's gate
//
// Tiling. A work tile is (batch, head, 128 queries), or 192 queries with up to 64 dims. Persistent
// CTAs fetch work tiles from an atomic counter, which balances uneven masks. Each work tile loops
// over tiles of 128 keys (64 where values are wide or scores have biases). Key tiles that no query
// sees are skipped, and the scores of tiles that every query sees completely are not tested.
//
// Warpgroups.
//   0, 1, and 2 with up to 64 dims
//         MMA: 64 queries each; S = QK^T, softmax, O += PV
//   last  producer: warp 0 schedules tiles, warp 1 issues TMA loads, warps 2 and 3 build the mask
//         bits of partial tiles (fwd_producer.cuh)
// The MMA warpgroups take turns by ping-pong barriers: one issues its MMAs (the next tile's QK^T,
// then this tile's PV) while the others compute their softmax.
//
// Running maximum. Probabilities are relative to a running maximum that is updated lazily: it moves
// only when a score exceeds it by more than 8 in log2 units. The accumulators are then rarely
// rescaled, and probabilities stay in [0, 256]. The exact maximum is kept beside it.
//
// Shared memory for D = E = 128, in blocks of 64 columns (128-byte swizzle; see common/tile.cuh):
//   q     128 rows, 32 KiB
//   k, v  two stages of 128 keys each, 64 KiB for K and 64 KiB for V
//   out   1 KiB per warp, staging for the output
//   bits  four partial tiles, 2 KiB each: one word per query and 32 keys
// With biases, key tiles have 64 keys, and there are three stages, each with 16 KiB of
//   bias  128 queries by 64 keys
// The rest holds descriptions of tiles and mbarriers.
#pragma once

#include "masked_attention/fwd_consumer.cuh"
#include "masked_attention/fwd_producer.cuh"

namespace jax_dsa::masked_attention {

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    fwd_kernel(const __grid_constant__ MaskedAttentionFwdParams p,
               const __grid_constant__ TileScheduler scheduler,
               const __grid_constant__ Bounds bounds, const __grid_constant__ CUtensorMap q_map,
               const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
               const __grid_constant__ CUtensorMap bias_map) {
  auto& shared = dynamic_shared<Shared<Tr>>();
  if (threadIdx.x == 0) {
    init_barriers(shared);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (Tr::kWarpgroups > 2 && warpgroup < Tr::kWarpgroups) {
    // One code for all warpgroups. Three codes do not fit in the instruction cache.
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr, kEither>(p, shared);
  } else if (warpgroup == 0) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr, 0>(p, shared);
  } else if (warpgroup == 1) {
    raise_registers<Tr::kConsumerRegisters>();
    consume<Tr, 1>(p, shared);
  } else {
    lower_registers<Tr::kProducerRegisters>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) {
      schedule_tiles<Tr>(p, scheduler, bounds, shared);
    } else if (warp == 1) {
      load_tiles<Tr>(shared, TileLoader<Tr>{p, q_map, k_map, v_map, bias_map, shared});
    } else {
      build_mask_bits<Tr>(p, shared, warp - 2);
    }
  }
}

}  // namespace jax_dsa::masked_attention
