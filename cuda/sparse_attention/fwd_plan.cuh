// Traits and shared memory of the sparse attention forward kernel. See fwd.cuh.
#pragma once

#include "masked_attention/fwd_plan.cuh"
#include "sparse_attention/rows.cuh"

namespace jax_dsa::sparse_attention {

// Fewer steps of Q are in registers than in masked attention, because the places and the bits of
// the rows need registers, too.
template <DType kType, int kD, int kE>
using MaskedFwdTraits =
    masked_attention::FwdTraits<kType, kD, kE, false, false, 2, kD <= 128 ? 4 : 0>;

template <DType kType_, int kD_, int kE_>
struct FwdTraits : MaskedFwdTraits<kType_, kD_, kE_> {
  using Base = MaskedFwdTraits<kType_, kD_, kE_>;
  using Rows = HeadRows;
  // Two more entries than in masked attention where they fit, because the first step of a work tile
  // takes several lookups, one after the other.
  static constexpr int kQueued = Base::kQueued + (kD_ == 192 ? 0 : 2);
  using Extra = KeyRows<kQueued, Base::kKeys>;
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
  static_assert(registers_fit(1, 2, kConsumerRegisters, kProducerRegisters));
};

using FwdCall = TileCall<SparseAttentionFwdParams>;

}  // namespace jax_dsa::sparse_attention
