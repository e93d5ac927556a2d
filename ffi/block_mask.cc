// Handlers of block masks.

#include "block_mask/block_mask.h"

#include "ffi/common.h"
#include "ffi/limits.h"
#include "ffi/mask_operands.h"

namespace jax_dsa {
namespace {

// Reads what the three handlers share: the mask [B or 1, H', T or 1, S], where H' divides H, and
// the other operands that mask keys. `tiles` is the shape [B, H, I, J] of the result or of the
// slots.
ffi::Error read_params(const char* op, const AnyBuffer& mask, const MaskOperands& others,
                       Dims tiles, int64_t queries, int64_t keys, int64_t block_q, int64_t block_k,
                       BlockMaskParams* p) {
  namespace limits = ::jax_dsa::limits::block_mask;
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "tiles", tiles, {"B", "H", "I", "J"}));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "block_q", block_q, 1, limits::kMaxLength));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "block_k", block_k, 1, limits::kMaxLength));
  DSA_FFI_RETURN_IF_ERROR(check_multiple(op, "block_k", block_k, 8));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "T", queries, 0, limits::kMaxLength));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "S", keys, 0, limits::kMaxLength));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "H", tiles[1], 0, ::jax_dsa::limits::kInt32Max));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "tiles", tiles, tiles.first(2),
                                      {ceil_div(queries, block_q), ceil_div(keys, block_k)}));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "I * J", tiles[2] * tiles[3], 0, limits::kMaxTiles));
  p->batch = tiles[0];
  p->heads = static_cast<int>(tiles[1]);
  p->queries = queries;
  p->keys = keys;
  p->block_q = static_cast<int>(block_q);
  p->block_k = static_cast<int>(block_k);
  if (present(mask)) {
    const Dims dims = mask.dimensions();
    DSA_FFI_RETURN_IF_ERROR(check_dtype(op, "mask", mask.element_type(), {DataType::PRED}));
    const bool fits = dims.size() == 4 && (dims[0] == 1 || dims[0] == p->batch) && dims[1] > 0 &&
                      p->heads % dims[1] == 0 && (dims[2] == 1 || dims[2] == queries) &&
                      dims[3] == keys;
    if (!fits) {
      return invalid_argument(
          op, "'mask' has shape " + shape_string(dims) +
                  ", expected (B or 1, a divisor of H, T or 1, S) with (B, H, T, S) = (" +
                  std::to_string(p->batch) + ", " + std::to_string(p->heads) + ", " +
                  std::to_string(queries) + ", " + std::to_string(keys) + ")");
    }
    p->mask = static_cast<const uint8_t*>(mask.untyped_data());
    p->mask_batch = dims[0];
    p->mask_heads = static_cast<int>(dims[1]);
    p->mask_queries = dims[2];
  }
  return read_mask(op, others, *p, {.heads = p->heads, .groups = {}}, &p->others);
}

// mask [B or 1, H', T or 1, S]?, the seven MaskOperands -> occupied, full [B, H, I, J]
ffi::Error block_mask_classify(cudaStream_t stream, AnyBuffer mask, AnyBuffer starts,
                               AnyBuffer ends, AnyBuffer q_segments, AnyBuffer kv_segments,
                               AnyBuffer rows, AnyBuffer tiles, AnyBuffer bits,
                               Result<Bool> occupied, Result<Bool> full,
                               Attr<int64_t, "queries"> queries, Attr<int64_t, "keys"> keys,
                               Attr<int64_t, "block_q"> block_q, Attr<int64_t, "block_k"> block_k) {
  constexpr const char* kOp = "block_mask_classify";
  BlockMaskParams params = {};
  DSA_FFI_RETURN_IF_ERROR(
      read_params(kOp, mask, {starts, ends, q_segments, kv_segments, rows, tiles, bits},
                  occupied->dimensions(), queries, keys, block_q, block_k, &params));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "full", full->dimensions(), occupied->dimensions(), {}));
  return launch_status(
      kOp, launch_block_mask_classify(params, occupied->typed_data(), full->typed_data(), stream));
}

// mask, the seven MaskOperands, slots [B, H, I, J] -> packed [B, H, P, block_q, block_k / 8]
ffi::Error block_mask_pack(cudaStream_t stream, AnyBuffer mask, AnyBuffer starts, AnyBuffer ends,
                           AnyBuffer q_segments, AnyBuffer kv_segments, AnyBuffer rows,
                           AnyBuffer tiles, AnyBuffer bits, S32 slots, Result<U8> packed,
                           Attr<int64_t, "queries"> queries, Attr<int64_t, "keys"> keys) {
  constexpr const char* kOp = "block_mask_pack";
  const Dims dims = packed->dimensions();
  DSA_FFI_RETURN_IF_ERROR(
      check_rank(kOp, "packed", dims, {"B", "H", "P", "block_q", "block_k / 8"}));
  BlockMaskParams params = {};
  DSA_FFI_RETURN_IF_ERROR(
      read_params(kOp, mask, {starts, ends, q_segments, kv_segments, rows, tiles, bits},
                  slots.dimensions(), queries, keys, dims[3], dims[4] * 8, &params));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "packed", dims, slots.dimensions().first(2),
                                      {dims[2], params.block_q, params.block_k / 8}));
  return launch_status(kOp, launch_block_mask_pack(params, slots.typed_data(), packed->typed_data(),
                                                   dims[2], stream));
}

// mask, the seven MaskOperands
// -> compressed [B, H, I, J], packed [B, H, I * J, block_q, block_k / 8]
ffi::Error block_mask_compress(cudaStream_t stream, AnyBuffer mask, AnyBuffer starts,
                               AnyBuffer ends, AnyBuffer q_segments, AnyBuffer kv_segments,
                               AnyBuffer rows, AnyBuffer tiles, AnyBuffer bits,
                               Result<S32> compressed, Result<U8> packed,
                               Attr<int64_t, "queries"> queries, Attr<int64_t, "keys"> keys) {
  constexpr const char* kOp = "block_mask_compress";
  const Dims dims = packed->dimensions(), kinds = compressed->dimensions();
  DSA_FFI_RETURN_IF_ERROR(
      check_rank(kOp, "packed", dims, {"B", "H", "I * J", "block_q", "block_k / 8"}));
  BlockMaskParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_params(kOp, mask,
                                      {starts, ends, q_segments, kv_segments, rows, tiles, bits},
                                      kinds, queries, keys, dims[3], dims[4] * 8, &params));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "packed", dims, kinds.first(2),
                                      {kinds[2] * kinds[3], params.block_q, params.block_k / 8}));
  return launch_status(kOp, launch_block_mask_compress(params, compressed->typed_data(),
                                                       packed->typed_data(), stream));
}

DSA_FFI_HANDLER("jax_dsa.block_mask_classify.v1", block_mask_classify, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.block_mask_compress.v1", block_mask_compress, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.block_mask_pack.v1", block_mask_pack, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
