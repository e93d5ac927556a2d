// The operands that masked attention's forward and backward handlers share.
#pragma once

#include <string>

#include "ffi/attention_operands.h"
#include "ffi/common.h"
#include "ffi/limits.h"
#include "ffi/mask_operands.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {

// Checks the shape of the bias or of its gradient: [B or 1, N or G or 1, T or 1, S rounded up to a
// multiple of 8].
template <typename Params>
ffi::Error check_bias(const char* op, const char* name, const AnyBuffer& x, const AnyBuffer& q,
                      const Params& p) {
  const AttentionBias& b = p.bias;
  return check_like_q(op, name, x, q, {b.batch, b.heads, b.queries, (p.keys + 7) / 8 * 8});
}

// Reads the bias, if there is one.
template <typename Params>
ffi::Error read_bias(const char* op, const AnyBuffer& bias, const AnyBuffer& q, Params* p) {
  if (!present(bias)) return ffi::Error::Success();
  const Dims dims = bias.dimensions();
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "bias", dims, {"B or 1", "N, G or 1", "T or 1", "S"}));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "the batch size of 'bias'", dims[0], {1, p->batch}));
  DSA_FFI_RETURN_IF_ERROR(
      check_one_of(op, "the number of heads of 'bias'", dims[1], {1, p->groups, p->heads}));
  DSA_FFI_RETURN_IF_ERROR(
      check_one_of(op, "the number of queries of 'bias'", dims[2], {1, p->queries}));
  p->bias = {bias.untyped_data(), dims[2], static_cast<int>(dims[0]), static_cast<int>(dims[1])};
  return check_bias(op, "bias", bias, q, *p);
}

// Reads q [B, T, N, D], k [B, S, G, D], v [B, S, G, E], the masks and the bias.
template <typename Params>
ffi::Error read_operands(const char* op, const AnyBuffer& q, const AnyBuffer& k, const AnyBuffer& v,
                         const MaskOperands& mask, const AnyBuffer& bias, float scale,
                         float softcap, Params* params) {
  DSA_FFI_RETURN_IF_ERROR(read_qkv(op, q, k, v, params));
  params->scale = scale;
  params->softcap = softcap;
  DSA_FFI_RETURN_IF_ERROR(read_bias(op, bias, q, params));
  DSA_FFI_RETURN_IF_ERROR(
      read_mask(op, mask, *params, {params->heads, params->groups}, &params->mask));
  if (!present(mask.tiles)) return ffi::Error::Success();
  return check_multiple(op, "block_k", params->mask.block_k,
                        limits::masked_attention::kBlockKMultiple);
}

}  // namespace jax_dsa
