// Traits and shared memory of the sparse attention forward kernel. See fwd.cuh.
#pragma once

#include "masked_attention/fwd_plan.cuh"
#include "sparse_attention/rows.cuh"

namespace jax_dsa::sparse_attention {

template <DType kType_, int kD_, int kE_>
struct FwdTraits : masked_attention::FwdTraits<kType_, kD_, kE_, false> {
  using Rows = HeadRows;
};

using FwdCall = TileCall<SparseAttentionFwdParams>;

}  // namespace jax_dsa::sparse_attention
