// Handlers of block masks.

#include "block_mask/block_mask.h"

#include <limits>

#include "ffi/common.h"
#include "ffi/mask_operands.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

// The parameters of results with tiles [B, H, I, J]: from the mask [B or 1, H', T or 1, S], where
// H' divides H, and the seven of MaskOperands, each maybe absent.
ffi::Error read_params(const char* op, const ffi::AnyBuffer& mask, const MaskOperands& others,
                       ffi::Span<const int64_t> tiles, int64_t queries, int64_t keys,
                       int64_t block_q, int64_t block_k, BlockMaskParams* p) {
  if (tiles.size() != 4) return invalid_argument(op, "the tiles are not of rank 4");
  if (block_q <= 0 || block_q > kMax || block_k <= 0 || block_k > kMax || block_k % 8 != 0) {
    return invalid_argument(op, "the tiles have a wrong size");
  }
  if (queries > kBlockMaskMaxLength || keys > kBlockMaskMaxLength || tiles[1] > kMax) {
    return invalid_argument(op, "there are too many queries, keys or heads");
  }
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "tiles", tiles, tiles.first(2),
                                      {ceil_div(queries, block_q), ceil_div(keys, block_k)}));
  p->batch = tiles[0];
  p->heads = static_cast<int>(tiles[1]);
  p->queries = queries;
  p->keys = keys;
  p->block_q = static_cast<int>(block_q);
  p->block_k = static_cast<int>(block_k);
  if (present(mask)) {
    const auto dims = mask.dimensions();
    const bool fits = dims.size() == 4 && (dims[0] == 1 || dims[0] == p->batch) && dims[1] > 0 &&
                      p->heads % dims[1] == 0 && (dims[2] == 1 || dims[2] == queries) &&
                      dims[3] == keys;
    if (mask.element_type() != ffi::DataType::PRED || !fits) {
      return invalid_argument(
          op, "mask is no bool array of a shape that broadcasts, but " + shape_string(dims));
    }
    p->mask = static_cast<const uint8_t*>(mask.untyped_data());
    p->mask_batch = dims[0];
    p->mask_heads = static_cast<int>(dims[1]);
    p->mask_queries = dims[2];
  }
  return read_mask(op, others, *p, &p->others);
}

// -> occupied, full [B, H, I, J]
ffi::Error block_mask_classify(cudaStream_t stream, ffi::AnyBuffer mask, ffi::AnyBuffer starts,
                               ffi::AnyBuffer ends, ffi::AnyBuffer q_segments,
                               ffi::AnyBuffer kv_segments, ffi::AnyBuffer rows,
                               ffi::AnyBuffer tiles, ffi::AnyBuffer bits,
                               ffi::Result<ffi::Buffer<ffi::PRED>> occupied,
                               ffi::Result<ffi::Buffer<ffi::PRED>> full, int64_t queries,
                               int64_t keys, int64_t block_q, int64_t block_k) {
  constexpr const char* kOp = "block_mask_classify";
  BlockMaskParams params = {};
  DSA_FFI_RETURN_IF_ERROR(
      read_params(kOp, mask, {starts, ends, q_segments, kv_segments, rows, tiles, bits},
                  occupied->dimensions(), queries, keys, block_q, block_k, &params));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "full", full->dimensions(), occupied->dimensions(), {}));
  return launch_status(
      kOp, launch_block_mask_classify(params, occupied->typed_data(), full->typed_data(), stream));
}

// and slots [B, H, I, J] -> packed [B, H, P, block_q, block_k / 8]
ffi::Error block_mask_pack(cudaStream_t stream, ffi::AnyBuffer mask, ffi::AnyBuffer starts,
                           ffi::AnyBuffer ends, ffi::AnyBuffer q_segments,
                           ffi::AnyBuffer kv_segments, ffi::AnyBuffer rows, ffi::AnyBuffer tiles,
                           ffi::AnyBuffer bits, ffi::Buffer<ffi::S32> slots,
                           ffi::Result<ffi::Buffer<ffi::U8>> packed, int64_t queries,
                           int64_t keys) {
  constexpr const char* kOp = "block_mask_pack";
  const auto dims = packed->dimensions();
  if (dims.size() != 5) return invalid_argument(kOp, "the bits are not of rank 5");
  BlockMaskParams params = {};
  DSA_FFI_RETURN_IF_ERROR(
      read_params(kOp, mask, {starts, ends, q_segments, kv_segments, rows, tiles, bits},
                  slots.dimensions(), queries, keys, dims[3], dims[4] * 8, &params));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "packed", dims, slots.dimensions().first(2),
                                      {dims[2], params.block_q, params.block_k / 8}));
  return launch_status(kOp, launch_block_mask_pack(params, slots.typed_data(), packed->typed_data(),
                                                   dims[2], stream));
}

// -> compressed [B, H, I, J], packed [B, H, I * J, block_q, block_k / 8]
ffi::Error block_mask_compress(cudaStream_t stream, ffi::AnyBuffer mask, ffi::AnyBuffer starts,
                               ffi::AnyBuffer ends, ffi::AnyBuffer q_segments,
                               ffi::AnyBuffer kv_segments, ffi::AnyBuffer rows,
                               ffi::AnyBuffer tiles, ffi::AnyBuffer bits,
                               ffi::Result<ffi::Buffer<ffi::S32>> compressed,
                               ffi::Result<ffi::Buffer<ffi::U8>> packed, int64_t queries,
                               int64_t keys) {
  constexpr const char* kOp = "block_mask_compress";
  const auto dims = packed->dimensions(), kinds = compressed->dimensions();
  if (dims.size() != 5) return invalid_argument(kOp, "the bits are not of rank 5");
  BlockMaskParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_params(kOp, mask,
                                      {starts, ends, q_segments, kv_segments, rows, tiles, bits},
                                      kinds, queries, keys, dims[3], dims[4] * 8, &params));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "packed", dims, kinds.first(2),
                                      {kinds[2] * kinds[3], params.block_q, params.block_k / 8}));
  return launch_status(kOp, launch_block_mask_compress(params, compressed->typed_data(),
                                                       packed->typed_data(), stream));
}

// The operands that all of them begin with.
auto with_operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>();
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(BlockMaskClassify, jax_dsa::block_mask_classify,
                              jax_dsa::with_operands()
                                  .Ret<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Attr<int64_t>("queries")
                                  .Attr<int64_t>("keys")
                                  .Attr<int64_t>("block_q")
                                  .Attr<int64_t>("block_k"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(BlockMaskPack, jax_dsa::block_mask_pack,
                              jax_dsa::with_operands()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<int64_t>("queries")
                                  .Attr<int64_t>("keys"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(BlockMaskCompress, jax_dsa::block_mask_compress,
                              jax_dsa::with_operands()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<int64_t>("queries")
                                  .Attr<int64_t>("keys"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
