// What producer warpgroups of the MLA kernels share.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"

namespace jax_dsa::mla {

// Begins an item: when the one before has used its Q, `copy_queries` copies this one's, which an
// item without tiles does not need.
template <typename Shared, typename Copy>
__device__ __forceinline__ void begin_item(Shared& shared, uint32_t item_parity, int tiles,
                                           Copy copy_queries) {
  mbarrier_wait(&shared.q_free, item_parity ^ 1);
  if (threadIdx.x % 128 == 0) {
    shared.notes.tiles = tiles;
    mbarrier_arrive(&shared.q_full);
  }
  if (tiles > 0) copy_queries();
  cp_async_arrive(&shared.q_full);
}

}  // namespace jax_dsa::mla
