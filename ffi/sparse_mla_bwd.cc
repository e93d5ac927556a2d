// Handlers of sparse MLA's backward pass.

#include <algorithm>

#include "ffi/common.h"
#include "ffi/sparse_mla_shape.h"
#include "ffi/targets.h"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D], indices [B, T, G, K], ends [B, T]?, topk_length [B, T]?, dout
// [B, T, N, 512], lse [B, T, N], out [B, T, N, 512], dlse [B, T, N]
// and, if dkv is to be summed by rows, their order, s32, and keys, u32 (see sparse_mla.h)
// -> dq [B, T, N, D], dkv [B, S, G, D] f32 (if not by rows, columns at sparse_mla_dkv_place); then
// workspace:
//    counters and images, u8, order, s32, and rows [R, D], bf16: as many queries' as have room are
//    summed at a time
ffi::Error sparse_mla_bwd(cudaStream_t stream, ffi::Buffer<ffi::BF16> q, ffi::Buffer<ffi::BF16> kv,
                          ffi::Buffer<ffi::S32> indices, ffi::AnyBuffer ends,
                          ffi::AnyBuffer topk_length, ffi::Buffer<ffi::BF16> dout,
                          ffi::Buffer<ffi::F32> lse, ffi::Buffer<ffi::BF16> out,
                          ffi::Buffer<ffi::F32> dlse, ffi::AnyBuffer row_order,
                          ffi::AnyBuffer row_key, ffi::Result<ffi::Buffer<ffi::BF16>> dq,
                          ffi::Result<ffi::Buffer<ffi::F32>> dkv,
                          ffi::Result<ffi::Buffer<ffi::U8>> counters,
                          ffi::Result<ffi::Buffer<ffi::U8>> images,
                          ffi::Result<ffi::Buffer<ffi::S32>> order,
                          ffi::Result<ffi::Buffer<ffi::BF16>> rows, float scale) {
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
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dkv", dkv->dimensions(), kv.dimensions(), {}));
  SparseMlaBwdParams params = {
      .q = q.untyped_data(),
      .kv = kv.untyped_data(),
      .indices = indices.typed_data(),
      .dout = dout.untyped_data(),
      .lse = lse.typed_data(),
      .out = out.untyped_data(),
      .dlse = dlse.typed_data(),
      .dq = dq->untyped_data(),
      .dkv = dkv->typed_data(),
      .rows = rows->untyped_data(),
      .counters = counters->untyped_data(),
      .images = images->untyped_data(),
      .order = order->typed_data(),
      .batch = shape.batch,
      .queries = shape.queries,
      .keys = shape.keys,
      .count = batch * queries,
      .heads = shape.heads,
      .groups = shape.groups,
      .slots = shape.slots,
      .dim = shape.dim,
      .scale = scale,
      .by_rows = present(row_order),
  };
  if (present(row_key) != params.by_rows) return invalid_argument(kOp, "row_key is missing");
  const int64_t query_rows = sparse_mla_bwd_query_rows(params);
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "row_order", row_order, ffi::DataType::S32,
                                        {params.count, query_rows}, &params.row_order));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "row_key", row_key, ffi::DataType::U32,
                                        {params.count, query_rows}, &params.row_key));
  if (params.by_rows && params.count * query_rows > 0) {
    if (rows->dimensions().size() != 2 || rows->dimensions()[1] != shape.dim) {
      return invalid_argument(kOp, "rows are " + shape_string(rows->dimensions()));
    }
    params.count = std::min(params.count, rows->dimensions()[0] / query_rows);
    if (params.count == 0) return invalid_argument(kOp, "there is no room for a query's rows");
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
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Attr<float>("scale"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
