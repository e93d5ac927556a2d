// The operands that both passes of masked attention have, checked and gathered.
#pragma once

#include <limits>
#include <string>

#include "ffi/common.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {

// Which keys each query sees; of what is absent nothing is hidden.
struct MaskOperands {
  ffi::AnyBuffer starts;       // [B, T] or [1, T]
  ffi::AnyBuffer ends;         // like starts
  ffi::AnyBuffer q_segments;   // [B, T]
  ffi::AnyBuffer kv_segments;  // [B, S]
  ffi::AnyBuffer rows;         // [B, T] or [1, T]
  ffi::AnyBuffer tiles;        // [B or 1, N or G or 1, I, J]
  ffi::AnyBuffer bits;         // [B or 1, N or G or 1, P, block_q, block_k / 8]
};

// Fails unless x has elements like q and this shape.
inline ffi::Error check_like_q(const char* op, const char* name, const ffi::AnyBuffer& x,
                               const ffi::AnyBuffer& q, std::initializer_list<int64_t> dims) {
  if (x.element_type() != q.element_type()) {
    return invalid_argument(op, std::string(name) + " has another dtype than q");
  }
  return check_shape(op, name, x.dimensions(), {}, dims);
}

// The map in tiles, which all of a batch or all heads may share, if there is one.
template <typename Params>
ffi::Error read_map(const char* op, const MaskOperands& given, const Params& p,
                    AttentionMask* mask) {
  if (!present(given.tiles)) return ffi::Error::Success();
  const auto tiles = given.tiles.dimensions(), bits = given.bits.dimensions();
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (!present(given.rows) || tiles.size() != 4 || bits.size() != 5) {
    return invalid_argument(op, "a map has rows, tiles of rank 4 and bits of rank 5");
  }
  const int64_t batch = tiles[0], heads = tiles[1], row_batch = given.rows.dimensions()[0];
  if ((batch != 1 && batch != p.batch) || (row_batch != 1 && row_batch != p.batch)) {
    return invalid_argument(op, "the map has another batch size than q");
  }
  if (heads != 1 && heads != p.groups && heads != p.heads) {
    return invalid_argument(op, "the map's heads are neither 1 nor G nor N");
  }
  if (tiles[2] > kMax || tiles[3] > kMax || bits[3] > kMax || bits[4] > kMax / 8) {
    return invalid_argument(op, "the map exceeds 2^31 - 1");
  }
  if (tiles[3] * bits[4] * 8 < p.keys) return invalid_argument(op, "the map has too few keys");
  mask->map_rows_stride = row_batch == 1 ? 0 : p.queries;
  mask->map_batch = static_cast<int>(batch);
  mask->map_heads = static_cast<int>(heads);
  mask->tile_rows = static_cast<int>(tiles[2]);
  mask->tile_columns = static_cast<int>(tiles[3]);
  mask->slots = bits[2];
  mask->block_q = static_cast<int>(bits[3]);
  mask->block_k = static_cast<int>(bits[4] * 8);
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "rows", given.rows, ffi::DataType::S32,
                                        {row_batch, p.queries}, &mask->map_rows));
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "tiles", given.tiles, ffi::DataType::S32,
                                        {batch, heads, tiles[2], tiles[3]}, &mask->tiles));
  return optional_data(op, "bits", given.bits, ffi::DataType::U8,
                       {batch, heads, bits[2], bits[3], bits[4]}, &mask->bits);
}

template <typename Params>
ffi::Error read_mask(const char* op, const MaskOperands& given, const Params& p,
                     AttentionMask* mask) {
  const ffi::AnyBuffer& range = present(given.starts) ? given.starts : given.ends;
  const int64_t range_batch = present(range) ? range.dimensions()[0] : 1;
  if (range_batch != 1 && range_batch != p.batch) {
    return invalid_argument(op, "the ranges have another batch size than q");
  }
  mask->range_stride = range_batch == 1 ? 0 : p.queries;
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "starts", given.starts, ffi::DataType::S32,
                                        {range_batch, p.queries}, &mask->starts));
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "ends", given.ends, ffi::DataType::S32,
                                        {range_batch, p.queries}, &mask->ends));
  if (present(given.q_segments) != present(given.kv_segments)) {
    return invalid_argument(op, "segments of one side are missing");
  }
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "q_segments", given.q_segments, ffi::DataType::S32,
                                        {p.batch, p.queries}, &mask->q_segments));
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "kv_segments", given.kv_segments, ffi::DataType::S32,
                                        {p.batch, p.keys}, &mask->kv_segments));
  return read_map(op, given, p, mask);
}

// The shape of the bias and of its gradient: [B or 1, N or G or 1, T or 1, S in whole eights].
template <typename Params>
ffi::Error check_bias(const char* op, const char* name, const ffi::AnyBuffer& x,
                      const ffi::AnyBuffer& q, const Params& p) {
  const AttentionBias& b = p.bias;
  return check_like_q(op, name, x, q, {b.batch, b.heads, b.queries, (p.keys + 7) / 8 * 8});
}

// The bias, if there is one.
template <typename Params>
ffi::Error read_bias(const char* op, const ffi::AnyBuffer& bias, const ffi::AnyBuffer& q,
                     Params* p) {
  if (!present(bias)) return ffi::Error::Success();
  const auto dims = bias.dimensions();
  if (dims.size() != 4) return invalid_argument(op, "bias is not of rank 4");
  if ((dims[0] != 1 && dims[0] != p->batch) || (dims[2] != 1 && dims[2] != p->queries)) {
    return invalid_argument(op, "bias has another batch size than q, or other queries");
  }
  if (dims[1] != 1 && dims[1] != p->groups && dims[1] != p->heads) {
    return invalid_argument(op, "bias has neither 1 nor G nor N heads");
  }
  p->bias = {bias.untyped_data(), dims[2], static_cast<int>(dims[0]), static_cast<int>(dims[1])};
  return check_bias(op, "bias", bias, q, *p);
}

// q [B, T, N, D], k [B, S, G, D], v [B, S, G, E], which keys each query sees, and the bias.
template <typename Params>
ffi::Error read_operands(const char* op, const ffi::AnyBuffer& q, const ffi::AnyBuffer& k,
                         const ffi::AnyBuffer& v, const MaskOperands& mask,
                         const ffi::AnyBuffer& bias, float scale, float softcap, Params* params) {
  const auto dtype = kernel_dtype(q.element_type());
  if (dtype != DType::kBF16 && dtype != DType::kF16) {
    return invalid_argument(op, "q is neither bfloat16 nor float16");
  }
  if (q.dimensions().size() != 4 || k.dimensions().size() != 4 || v.dimensions().size() != 4) {
    return invalid_argument(op, "q, k or v is not of rank 4");
  }
  const int64_t batch = q.dimensions()[0], queries = q.dimensions()[1], heads = q.dimensions()[2];
  const int64_t dim = q.dimensions()[3], keys = k.dimensions()[1], groups = k.dimensions()[2];
  const int64_t value_dim = v.dimensions()[3];
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (heads > kMax || dim > kMax || value_dim > kMax) {
    return invalid_argument(op, "N, D or E exceeds 2^31 - 1");
  }
  if (groups == 0 || heads % groups != 0) return invalid_argument(op, "N is no multiple of G");
  DSA_FFI_RETURN_IF_ERROR(check_like_q(op, "k", k, q, {batch, keys, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_like_q(op, "v", v, q, {batch, keys, groups, value_dim}));
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
  params->dtype = *dtype;
  params->scale = scale;
  params->softcap = softcap;
  DSA_FFI_RETURN_IF_ERROR(read_bias(op, bias, q, params));
  return read_mask(op, mask, *params, &params->mask);
}

}  // namespace jax_dsa
