// Traits and shared memory of the sparse attention forward kernel. See fwd.cuh.
#pragma once

#include "masked_attention/fwd_plan.cuh"
#include "sparse_attention/rows.cuh"

namespace jax_dsa::sparse_attention {

inline constexpr int kTileRows = 128;  // MMA rows of a work tile

template <DType kType_, int kD_, int kE_>
struct FwdTraits : masked_attention::FwdTraits<kType_, kD_, kE_, false> {
  using Rows = HeadRows;
};

// The parameters, and the number of queries of a work tile.
struct FwdCall : SparseAttentionFwdParams {
  int tile_queries;
};

template <typename Tr>
struct Shared : masked_attention::Shared<Tr> {
  // By slot of the queue: the first row of k of each box of a key tile, which has
  // min(block_size, kKeys) rows.
  int32_t rows[Tr::kQueued][Tr::kKeys];
};

}  // namespace jax_dsa::sparse_attention
