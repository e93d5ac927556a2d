// Handlers of sparse MLA's backward pass.

#include "ffi/common.h"
#include "ffi/sparse_mla_shape.h"
#include "ffi/targets.h"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], ends [B, T]?, topk_length [B, T]?, dout
// [B, T, N, 512], lse [B, T, N], out [B, T, N, 512], dlse [B, T, N]
// -> dq [B, T, N, D], and dkv [B, S, G, D] f32 (columns at sparse_mla_dkv_place) or, if by_rows,
// rows [_, D] bf16; then workspace:
//    counters and images, u8, and order, s32
ffi::Error sparse_mla_bwd(cudaStream_t stream, ffi::Buffer<ffi::BF16> q, ffi::Buffer<ffi::BF16> kv,
                          ffi::Buffer<ffi::S32> indices, ffi::AnyBuffer ends,
                          ffi::AnyBuffer topk_length, ffi::Buffer<ffi::BF16> dout,
                          ffi::Buffer<ffi::F32> lse, ffi::Buffer<ffi::BF16> out,
                          ffi::Buffer<ffi::F32> dlse, ffi::Result<ffi::Buffer<ffi::BF16>> dq,
                          ffi::Result<ffi::AnyBuffer> dkv,
                          ffi::Result<ffi::Buffer<ffi::U8>> counters,
                          ffi::Result<ffi::Buffer<ffi::U8>> images,
                          ffi::Result<ffi::Buffer<ffi::S32>> order, float scale, bool by_rows) {
  constexpr const char* kOp = "sparse_mla_bwd";
  SparseMlaShape shape;
  DSA_FFI_RETURN_IF_ERROR(
      SparseMlaShape::read(kOp, q.dimensions(), kv.dimensions(), indices.dimensions(), &shape));
  if (!(scale > 0.f)) return invalid_argument(kOp, "the scale is not positive");
  const int64_t batch = shape.batch, queries = shape.queries, heads = shape.heads;
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dout", dout.dimensions(), {},
                                      {batch, queries, heads, int64_t{kSparseMlaValueDim}}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse.dimensions(), {}, {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out.dimensions(), dout.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dlse", dlse.dimensions(), {}, {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dq", dq->dimensions(), q.dimensions(), {}));
  SparseMlaBwdParams params = {
      .q = q.untyped_data(),
      .kv = kv.untyped_data(),
      .indices = indices.typed_data(),
      .dout = dout.untyped_data(),
      .lse = lse.typed_data(),
      .out = out.untyped_data(),
      .dlse = dlse.typed_data(),
      .dq = dq->untyped_data(),
      .counters = counters->untyped_data(),
      .images = images->untyped_data(),
      .order = order->typed_data(),
      .batch = shape.batch,
      .queries = shape.queries,
      .keys = shape.keys,
      .heads = shape.heads,
      .groups = shape.groups,
      .slots = shape.slots,
      .dim = shape.dim,
      .scale = scale,
      .by_rows = by_rows,
  };
  if (by_rows) {
    if (dkv->element_type() != ffi::DataType::BF16) {
      return invalid_argument(kOp, "rows are not bfloat16");
    }
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "rows", dkv->dimensions(), {},
                                        {sparse_mla_bwd_row_count(params), int64_t{shape.dim}}));
    params.rows = dkv->untyped_data();
  } else {
    if (dkv->element_type() != ffi::DataType::F32) {
      return invalid_argument(kOp, "dkv is not float32");
    }
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dkv", dkv->dimensions(), kv.dimensions(), {}));
    params.dkv = static_cast<float*>(dkv->untyped_data());
  }
  if (static_cast<int64_t>(counters->element_count()) < sparse_mla_bwd_counter_bytes(params) ||
      static_cast<int64_t>(images->element_count()) < sparse_mla_bwd_image_bytes(params) ||
      static_cast<int64_t>(order->size_bytes()) < sparse_mla_bwd_order_bytes(params)) {
    return invalid_argument(kOp, "the workspace is too small");
  }
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "ends", ends, ffi::DataType::S32, {batch, queries}, &params.ends));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "topk_length", topk_length, ffi::DataType::S32,
                                        {batch, queries}, &params.topk_length));
  return launch_status(kOp, launch_sparse_mla_bwd(params, stream));
}

// rows [R, D] bf16, order [R] int32, key [R] uint32, dkv [S, D] f32, which shares its memory with
// the result -> dkv
ffi::Error sparse_mla_sum_rows(cudaStream_t stream, ffi::Buffer<ffi::BF16> rows,
                               ffi::Buffer<ffi::S32> order, ffi::Buffer<ffi::U32> key,
                               ffi::Buffer<ffi::F32> dkv, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  constexpr const char* kOp = "sparse_mla_sum_rows";
  if (rows.dimensions().size() != 2) return invalid_argument(kOp, "rows is not of rank 2");
  if (dkv.dimensions().size() != 2) return invalid_argument(kOp, "dkv is not of rank 2");
  const int64_t count = rows.dimensions()[0], dim = rows.dimensions()[1];
  const int64_t keys = dkv.dimensions()[0];
  if (count > std::numeric_limits<int32_t>::max()) {
    return invalid_argument(kOp, "more than 2^31 - 1 rows");
  }
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "order", order.dimensions(), {}, {count}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "key", key.dimensions(), {}, {count}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dkv", dkv.dimensions(), {}, {keys, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "the result", out->dimensions(), {}, {keys, dim}));
  if (out->untyped_data() != dkv.untyped_data()) {
    return invalid_argument(kOp, "dkv and the result are different memory");
  }
  const SparseMlaSumRowsParams params = {
      .rows = rows.untyped_data(),
      .order = order.typed_data(),
      .key = key.typed_data(),
      .dkv = out->typed_data(),
      .row_count = count,
      .keys = keys,
      .dim = static_cast<int>(dim),
  };
  return launch_status(kOp, launch_sparse_mla_sum_rows(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseMlaBwd, jax_dsa::sparse_mla_bwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<float>("scale")
                                  .Attr<bool>("by_rows"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseMlaSumRows, jax_dsa::sparse_mla_sum_rows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
