// Handlers of sparse MLA's backward pass.

#include <algorithm>

#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"
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
  SparseMlaBwdParams params = {};
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, kv, indices, ends, topk_length, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  const int64_t batch = params.batch, queries = params.queries, heads = params.heads;
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dout", dout.dimensions(), {},
                                      {batch, queries, heads, int64_t{kMlaValueDim}}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse.dimensions(), {}, {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out.dimensions(), dout.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dlse", dlse.dimensions(), {}, {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dq", dq->dimensions(), q.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dkv", dkv->dimensions(), kv.dimensions(), {}));
  params.dout = dout.untyped_data();
  params.lse = lse.typed_data();
  params.out = out.untyped_data();
  params.dlse = dlse.typed_data();
  params.dq = dq->untyped_data();
  params.dkv = dkv->typed_data();
  params.rows = rows->untyped_data();
  params.counters = counters->untyped_data();
  params.images = images->untyped_data();
  params.order = order->typed_data();
  params.count = batch * queries;
  params.by_rows = present(row_order);
  if (present(row_key) != params.by_rows) return invalid_argument(kOp, "row_key is missing");
  const int64_t query_rows = sparse_mla_bwd_query_rows(params);
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "row_order", row_order, ffi::DataType::S32,
                                        {params.count, query_rows}, &params.row_order));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "row_key", row_key, ffi::DataType::U32,
                                        {params.count, query_rows}, &params.row_key));
  if (params.by_rows && params.count * query_rows > 0) {
    if (rows->dimensions().size() != 2 || rows->dimensions()[1] != params.dim) {
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
