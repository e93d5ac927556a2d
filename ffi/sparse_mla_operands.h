// The operands that the handlers of sparse MLA, attn_dist and mqa_decode share.
#pragma once

#include <cstddef>

#include "ffi/common.h"
#include "ffi/limits.h"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa {

// The layout of `kv`, by default [B, S, G, D].
struct KeyLayout {
  bool shared = false;   // the batch axis has size 1, because all requests share the keys
  int record_bytes = 0;  // the size of a row if it is an FP8 record; 0 if it is D values
};

// Reads q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], ends [B, T]?, topk_length [B, T]?.
// D is one of `dims`.
template <typename Keys, typename Indices, typename Params, size_t kDimCount = 2>
ffi::Error read_operands(const char* op, const BF16& q, const Keys& kv, const Indices& indices,
                         const AnyBuffer& ends, const AnyBuffer& topk_length, Params* params,
                         KeyLayout layout = {},
                         const int64_t (&dims)[kDimCount] = limits::sparse_mla::kDims) {
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "q", q.dimensions(), {"B", "T", "N", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "kv", kv.dimensions(), {"B", "S", "G", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "indices", indices.dimensions(), {"B", "T", "G", "K"}));
  const int64_t batch = q.dimensions()[0], queries = q.dimensions()[1], heads = q.dimensions()[2];
  const int64_t dim = q.dimensions()[3], keys = kv.dimensions()[1], groups = kv.dimensions()[2];
  const int64_t slots = indices.dimensions()[3];
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "D", dim, dims));
  DSA_FFI_RETURN_IF_ERROR(check_groups(op, heads, groups));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "N", heads, 0, limits::kInt32Max));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "K", slots, 0, limits::kInt32Max));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "kv", kv.dimensions(),
                                      {layout.shared ? 1 : batch, keys, groups,
                                       layout.record_bytes > 0 ? layout.record_bytes : dim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(op, "indices", indices.dimensions(), {batch, queries, groups, slots}));
  params->q = q.untyped_data();
  params->kv = kv.untyped_data();
  params->indices = static_cast<const int32_t*>(indices.untyped_data());
  params->batch = batch;
  params->queries = queries;
  params->keys = keys;
  params->heads = static_cast<int>(heads);
  params->groups = static_cast<int>(groups);
  params->slots = static_cast<int>(slots);
  params->dim = static_cast<int>(dim);
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(op, "ends", ends, DataType::S32, {batch, queries}, &params->ends));
  return optional_data(op, "topk_length", topk_length, DataType::S32, {batch, queries},
                       &params->topk_length);
}

// Reads sinks [B, N]? or [1, N]?, after the operands above.
template <typename Params>
ffi::Error read_sinks(const char* op, const AnyBuffer& sinks, Params* params) {
  const int64_t batch = present(sinks) ? sinks.dimensions()[0] : 1;
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "the batch size of 'sinks'", batch, {1, params->batch}));
  params->sinks_stride = batch == 1 ? 0 : params->heads;
  return optional_data(op, "sinks", sinks, DataType::F32, {batch, params->heads}, &params->sinks);
}

// Reads sparse MLA's out [B, T, N, 512], max_logit and log_sum [B, T, N], after the operands above.
inline ffi::Error read_results(const char* op, const BF16& out, const F32& max_logit,
                               const F32& log_sum, SparseMlaFwdParams* params) {
  const int64_t batch = params->batch, queries = params->queries, heads = params->heads;
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "out", out.dimensions(),
                                      {batch, queries, heads, limits::sparse_mla::kValueDim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(op, "max_logit", max_logit.dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(op, "log_sum", log_sum.dimensions(), {batch, queries, heads}));
  params->out = out.untyped_data();
  params->max_logit = max_logit.typed_data();
  params->log_sum = log_sum.typed_data();
  return ffi::Error::Success();
}

// Reads the scale of the scores where it has to be positive.
template <typename Params>
ffi::Error read_scale(const char* op, float scale, Params* params) {
  params->scale = scale;
  if (scale > 0.f) return ffi::Error::Success();
  return invalid_argument(op, "scale is " + std::to_string(scale) + ", expected a positive number");
}

// Reads a page table [B, R]? over the `rows` rows of a pool of keys. `params->keys` becomes the
// number of keys that a request's pages hold.
template <typename Params>
ffi::Error read_page_table(const char* op, const char* keys_name, const AnyBuffer& page_table,
                           int64_t rows, int64_t page_size, Params* params) {
  if (!present(page_table)) return ffi::Error::Success();
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "page_table", page_table.dimensions(), {"B", "R"}));
  const int64_t page_slots = page_table.dimensions()[1];
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "page_size", page_size, 1, limits::kInt32Max));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "R", page_slots, 0, limits::kInt32Max));
  if (rows % page_size != 0 || rows > limits::kInt32Max) {
    return invalid_argument(op, "'" + std::string(keys_name) + "' has " + std::to_string(rows) +
                                    " rows, expected a multiple of page_size = " +
                                    std::to_string(page_size) + " up to 2^31 - 1");
  }
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "page_table", page_table, DataType::S32,
                                        {params->batch, page_slots}, &params->page_table));
  params->pages = static_cast<int>(rows / page_size);
  params->page_size = static_cast<int>(page_size);
  params->page_slots = static_cast<int>(page_slots);
  params->keys = page_slots * page_size;
  return ffi::Error::Success();
}

}  // namespace jax_dsa
