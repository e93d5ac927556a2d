// The operands that say which keys a query sees, checked and gathered.
#pragma once

#include <limits>
#include <string>

#include "ffi/common.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {

// Of what is absent nothing is hidden.
struct MaskOperands {
  ffi::AnyBuffer starts;       // [B, T] or [1, T]
  ffi::AnyBuffer ends;         // like starts
  ffi::AnyBuffer q_segments;   // [B, T]
  ffi::AnyBuffer kv_segments;  // [B, S]
  ffi::AnyBuffer rows;         // [B, T] or [1, T]
  ffi::AnyBuffer tiles;        // [B or 1, H, I, J], for an H that divides the heads
  ffi::AnyBuffer bits;         // [B or 1, H, P, block_q, block_k / 8]
};

// The map in tiles, which all of a batch or several heads may share, if there is one.
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
    return invalid_argument(op, "the map has another batch size");
  }
  if (heads == 0 || p.heads % heads != 0) {
    return invalid_argument(op, "the map's heads do not divide the heads");
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
    return invalid_argument(op, "the ranges have another batch size");
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

}  // namespace jax_dsa
