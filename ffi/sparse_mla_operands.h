// The operands that the handlers of sparse MLA and attn_dist share, checked and gathered.
#pragma once

#include <limits>
#include <string>

#include "ffi/common.h"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa {

// How a row of `kv` and its batch axis lie; by default as [B, S, G, D].
struct KeyLayout {
  bool shared = false;   // all requests have the keys of one
  int record_bytes = 0;  // of a row, if it is a record and not D values
};

// q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], ends [B, T]?, topk_length [B, T]?
template <typename Keys, typename Params>
ffi::Error read_operands(const char* op, ffi::Buffer<ffi::BF16> q, Keys kv,
                         ffi::Buffer<ffi::S32> indices, ffi::AnyBuffer ends,
                         ffi::AnyBuffer topk_length, Params* params, KeyLayout layout = {}) {
  const auto rank_4 = [&](const char* name, ffi::AnyBuffer::Dimensions dims) {
    return dims.size() == 4 ? ffi::Error::Success()
                            : invalid_argument(op, std::string(name) + " is not of rank 4");
  };
  DSA_FFI_RETURN_IF_ERROR(rank_4("q", q.dimensions()));
  DSA_FFI_RETURN_IF_ERROR(rank_4("kv", kv.dimensions()));
  DSA_FFI_RETURN_IF_ERROR(rank_4("indices", indices.dimensions()));
  const int64_t batch = q.dimensions()[0], queries = q.dimensions()[1], heads = q.dimensions()[2];
  const int64_t dim = q.dimensions()[3], keys = kv.dimensions()[1], groups = kv.dimensions()[2];
  const int64_t slots = indices.dimensions()[3];
  if (dim != 576 && dim != 512) return invalid_argument(op, "D is neither 576 nor 512");
  if (groups == 0 || heads % groups != 0) return invalid_argument(op, "N is no multiple of G");
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (heads > kMax || slots > kMax) return invalid_argument(op, "N or K exceeds 2^31 - 1");
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "kv", kv.dimensions(), {},
                                      {layout.shared ? 1 : batch, keys, groups,
                                       layout.record_bytes > 0 ? layout.record_bytes : dim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(op, "indices", indices.dimensions(), {}, {batch, queries, groups, slots}));
  params->q = q.untyped_data();
  params->kv = kv.untyped_data();
  params->indices = indices.typed_data();
  params->batch = batch;
  params->queries = queries;
  params->keys = keys;
  params->heads = static_cast<int>(heads);
  params->groups = static_cast<int>(groups);
  params->slots = static_cast<int>(slots);
  params->dim = static_cast<int>(dim);
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(op, "ends", ends, ffi::DataType::S32, {batch, queries}, &params->ends));
  return optional_data(op, "topk_length", topk_length, ffi::DataType::S32, {batch, queries},
                       &params->topk_length);
}

// sinks [B, N]? or [1, N]?, after the operands above.
template <typename Params>
ffi::Error read_sinks(const char* op, ffi::AnyBuffer sinks, Params* params) {
  const int64_t batch = present(sinks) ? sinks.dimensions()[0] : 1;
  if (batch != 1 && batch != params->batch) {
    return invalid_argument(op, "sinks has another batch size than q");
  }
  params->sinks_stride = batch == 1 ? 0 : params->heads;
  return optional_data(op, "sinks", sinks, ffi::DataType::F32, {batch, params->heads},
                       &params->sinks);
}

// out [B, T, N, 512] and lse [B, T, N] of sparse MLA, after the operands above.
inline ffi::Error read_results(const char* op, ffi::Result<ffi::Buffer<ffi::BF16>> out,
                               ffi::Result<ffi::Buffer<ffi::F32>> lse, SparseMlaFwdParams* params) {
  const int64_t batch = params->batch, queries = params->queries, heads = params->heads;
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "out", out->dimensions(), {},
                                      {batch, queries, heads, int64_t{kMlaValueDim}}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "lse", lse->dimensions(), {}, {batch, queries, heads}));
  params->out = out->untyped_data();
  params->lse = lse->typed_data();
  return ffi::Error::Success();
}

// The factor of scores, where it has to be positive.
template <typename Params>
ffi::Error read_scale(const char* op, float scale, Params* params) {
  params->scale = scale;
  return scale > 0.f ? ffi::Error::Success() : invalid_argument(op, "the scale is not positive");
}

}  // namespace jax_dsa
