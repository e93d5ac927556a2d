// What the producer warpgroups of the MLA kernels share.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"

namespace jax_dsa::mla {

// Begins a work tile. Once the previous work tile's Q has been used, `copy_queries` copies the new
// Q, which a work tile without key tiles does not need.
template <typename Shared, typename Copy>
__device__ __forceinline__ void begin_work_tile(Shared& shared, uint32_t q_parity, int tiles,
                                                Copy copy_queries) {
  mbarrier_wait(&shared.q_free, q_parity ^ 1);
  if (threadIdx.x % 128 == 0) {
    shared.notes.tiles = tiles;
    mbarrier_arrive(&shared.q_full);
  }
  if (tiles > 0) copy_queries();
  cp_async_arrive(&shared.q_full);
}

}  // namespace jax_dsa::mla
