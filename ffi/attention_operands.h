// The operands that the handlers of masked attention and of sparse attention share.
#pragma once

#include <initializer_list>

#include "ffi/common.h"
#include "ffi/limits.h"

namespace jax_dsa {

// Fails unless x has the dtype of q and this shape.
inline ffi::Error check_like_q(const char* op, const char* name, const AnyBuffer& x,
                               const AnyBuffer& q, std::initializer_list<int64_t> dims) {
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, name, x.element_type(), {q.element_type()}));
  return check_shape(op, name, x.dimensions(), dims);
}

// Reads q [B, T, N, D], k [B, S, G, D] and v [B, S, G, E].
template <typename Params>
ffi::Error read_qkv(const char* op, const AnyBuffer& q, const AnyBuffer& k, const AnyBuffer& v,
                    Params* params) {
  namespace limits = ::jax_dsa::limits::masked_attention;
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, "q", q.element_type(), {DataType::BF16, DataType::F16}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "q", q.dimensions(), {"B", "T", "N", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "k", k.dimensions(), {"B", "S", "G", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "v", v.dimensions(), {"B", "S", "G", "E"}));
  const int64_t batch = q.dimensions()[0], queries = q.dimensions()[1], heads = q.dimensions()[2];
  const int64_t dim = q.dimensions()[3], keys = k.dimensions()[1], groups = k.dimensions()[2];
  const int64_t value_dim = v.dimensions()[3];
  DSA_FFI_RETURN_IF_ERROR(check_like_q(op, "k", k, q, {batch, keys, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(op, "v", v, q, {batch, keys, groups, value_dim}));
  DSA_FFI_RETURN_IF_ERROR(check_groups(op, heads, groups));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "N", heads, 0, ::jax_dsa::limits::kInt32Max));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "B", batch, 0, limits::kMaxLength));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "T", queries, 0, limits::kMaxLength));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "S", keys, 0, limits::kMaxLength));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "D", dim, 1, limits::kMaxDim));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "E", value_dim, 1, limits::kMaxDim));
  DSA_FFI_RETURN_IF_ERROR(check_multiple(op, "D", dim, limits::kDimMultiple));
  DSA_FFI_RETURN_IF_ERROR(check_multiple(op, "E", value_dim, limits::kDimMultiple));
  params->q = q.untyped_data();
  params->k = k.untyped_data();
  params->v = v.untyped_data();
  params->batch = batch;
  params->queries = queries;
  params->keys = keys;
  params->heads = static_cast<int>(heads);
  params->groups = static_cast<int>(groups);
  params->dim = static_cast<int>(dim);
  params->value_dim = static_cast<int>(value_dim);
  params->dtype = q.element_type() == DataType::BF16 ? DType::kBF16 : DType::kF16;
  return ffi::Error::Success();
}

// Reads the results of a forward pass: out [B, T, N, E], and max_logit and log_sum [B, T, N].
template <typename Params>
ffi::Error read_results(const char* op, const AnyBuffer& q, Result<AnyBuffer> out,
                        Result<F32> max_logit, Result<F32> log_sum, Params* params) {
  const int64_t batch = params->batch, queries = params->queries, heads = params->heads;
  DSA_FFI_RETURN_IF_ERROR(
      check_like_q(op, "out", *out, q, {batch, queries, heads, params->value_dim}));
  const std::initializer_list<int64_t> per_row = {batch, queries, heads};
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "max_logit", max_logit->dimensions(), per_row));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "log_sum", log_sum->dimensions(), per_row));
  params->out = out->untyped_data();
  params->max_logit = max_logit->typed_data();
  params->log_sum = log_sum->typed_data();
  return ffi::Error::Success();
}

}  // namespace jax_dsa
