// The operands that say which keys a query sees, for the handlers of masked attention and of block
// masks.
#pragma once

#include <optional>
#include <string>

#include "ffi/common.h"
#include "ffi/limits.h"
#include "masked_attention/masked_attention.h"

namespace jax_dsa {

// Each operand may be absent, and an absent one masks nothing.
struct MaskOperands {
  AnyBuffer starts;       // [B, T] or [1, T]
  AnyBuffer ends;         // [B, T] or [1, T], like starts
  AnyBuffer q_segments;   // [B, T]
  AnyBuffer kv_segments;  // [B, S]
  AnyBuffer rows;         // [B, T] or [1, T]
  AnyBuffer tiles;        // [B or 1, H, I, J]
  AnyBuffer bits;         // [B or 1, H, P, block_q, block_k / 8]
};

// How many heads H a block mask may have. Masked attention's kernels compare H with G to see
// whether the heads of a KV head group share a mask, so there H is 1, G or N. Where no groups are
// given, H is any divisor of N.
struct MapHeads {
  int64_t heads;
  std::optional<int64_t> groups;
};

inline ffi::Error check_map_heads(const char* op, int64_t map_heads, const MapHeads& expected) {
  constexpr const char* kWhat = "the number of heads of 'tiles'";
  const auto& [heads, groups] = expected;
  if (groups) return check_one_of(op, kWhat, map_heads, {1, *groups, heads});
  if (map_heads > 0 && heads % map_heads == 0) return ffi::Error::Success();
  return invalid_argument(op, std::string(kWhat) + " is " + std::to_string(map_heads) +
                                  ", expected a divisor of " + std::to_string(heads));
}

// Reads the block mask (a map of tiles), if there is one. It may be shared by the whole batch, and
// by several heads.
template <typename Params>
ffi::Error read_map(const char* op, const MaskOperands& given, const Params& p,
                    const MapHeads& expected_heads, AttentionMask* mask) {
  if (!present(given.tiles)) return ffi::Error::Success();
  const Dims rows = given.rows.dimensions(), tiles = given.tiles.dimensions();
  const Dims bits = given.bits.dimensions();
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "rows", rows, {"B or 1", "T"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "tiles", tiles, {"B or 1", "H", "I", "J"}));
  DSA_FFI_RETURN_IF_ERROR(
      check_rank(op, "bits", bits, {"B or 1", "H", "P", "block_q", "block_k / 8"}));
  const int64_t batch = tiles[0], heads = tiles[1];
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "the batch size of 'rows'", rows[0], {1, p.batch}));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "the batch size of 'tiles'", batch, {1, p.batch}));
  DSA_FFI_RETURN_IF_ERROR(check_map_heads(op, heads, expected_heads));
  constexpr int64_t kMax = limits::kInt32Max;
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "the number of tile rows", tiles[2], 0, kMax));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "the number of tile columns", tiles[3], 0, kMax));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "block_q", bits[3], 1, kMax));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "block_k / 8", bits[4], 1, kMax / 8));
  if (tiles[3] * bits[4] * 8 < p.keys) {
    return invalid_argument(op, "the block mask has " + std::to_string(tiles[3] * bits[4] * 8) +
                                    " keys, expected at least S = " + std::to_string(p.keys));
  }
  mask->map_rows_stride = rows[0] == 1 ? 0 : p.queries;
  mask->map_batch = static_cast<int>(batch);
  mask->map_heads = static_cast<int>(heads);
  mask->tile_rows = static_cast<int>(tiles[2]);
  mask->tile_columns = static_cast<int>(tiles[3]);
  mask->slots = bits[2];
  mask->block_q = static_cast<int>(bits[3]);
  mask->block_k = static_cast<int>(bits[4] * 8);
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(op, "rows", given.rows, DataType::S32, {rows[0], p.queries}, &mask->map_rows));
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "tiles", given.tiles, DataType::S32,
                                        {batch, heads, tiles[2], tiles[3]}, &mask->tiles));
  return optional_data(op, "bits", given.bits, DataType::U8,
                       {batch, heads, bits[2], bits[3], bits[4]}, &mask->bits);
}

// Reads all of the operands. Ranges that the whole batch shares are read with stride 0.
template <typename Params>
ffi::Error read_mask(const char* op, const MaskOperands& given, const Params& p,
                     const MapHeads& expected_heads, AttentionMask* mask) {
  const AnyBuffer& range = present(given.starts) ? given.starts : given.ends;
  const int64_t range_batch = present(range) ? range.dimensions()[0] : 1;
  DSA_FFI_RETURN_IF_ERROR(
      check_one_of(op, "the batch size of 'starts' and 'ends'", range_batch, {1, p.batch}));
  mask->range_stride = range_batch == 1 ? 0 : p.queries;
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "starts", given.starts, DataType::S32,
                                        {range_batch, p.queries}, &mask->starts));
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(op, "ends", given.ends, DataType::S32, {range_batch, p.queries}, &mask->ends));
  if (present(given.q_segments) != present(given.kv_segments)) {
    return invalid_argument(op, "'q_segments' and 'kv_segments' must be given together");
  }
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "q_segments", given.q_segments, DataType::S32,
                                        {p.batch, p.queries}, &mask->q_segments));
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "kv_segments", given.kv_segments, DataType::S32,
                                        {p.batch, p.keys}, &mask->kv_segments));
  return read_map(op, given, p, expected_heads, mask);
}

}  // namespace jax_dsa
