// Handler of mqa_decode.

#include "mqa_decode/mqa_decode.h"

#include <limits>

#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"
#include "ffi/targets.h"
#include "mla/layout.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], k [B, S, G, D] or [1, S, G, D] for all requests; with a page table rows of pages,
// [B or 1, P * page_size, G, D] (uint8: records of 656 bytes in place of D values); v the same with
// E, or absent: the first 512 of a key;
// starts [B, T], ends [B, T], sinks [B, N]?, page_table [B, M]?
// -> out [B, T, N, E], lse [B, T, N], top [B, T, N]?; and the workspace of `mqa_decode_workspace`
// `out` is bfloat16, or float32 if `top` is there.
ffi::Error mqa_decode(cudaStream_t stream, ffi::Buffer<ffi::BF16> q, ffi::AnyBuffer k,
                      ffi::AnyBuffer v, ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> ends,
                      ffi::AnyBuffer sinks, ffi::AnyBuffer page_table,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::F32>> lse,
                      ffi::Result<ffi::Buffer<ffi::F32>> top,
                      ffi::Result<ffi::Buffer<ffi::F32>> partial,
                      ffi::Result<ffi::Buffer<ffi::F32>> partial_rows,
                      ffi::Result<ffi::Buffer<ffi::S32>> cuts, float scale, int32_t page_size) {
  constexpr const char* kOp = "mqa_decode";
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (q.dimensions().size() != 4) return invalid_argument(kOp, "q is not of rank 4");
  if (k.dimensions().size() != 4) return invalid_argument(kOp, "k is not of rank 4");
  const int64_t batch = q.dimensions()[0], queries = q.dimensions()[1], heads = q.dimensions()[2];
  const int64_t dim = q.dimensions()[3], pools = k.dimensions()[0], rows = k.dimensions()[1];
  const int64_t groups = k.dimensions()[2];
  if (groups == 0 || heads % groups != 0) return invalid_argument(kOp, "N is no multiple of G");
  if (heads > kMax || dim > kMax) return invalid_argument(kOp, "N or D exceeds 2^31 - 1");
  if (pools != 1 && pools != batch) {
    return invalid_argument(kOp, "k has another batch size than q");
  }
  MqaDecodeParams params = {};
  params.records = k.element_type() == ffi::DataType::U8;
  if (!params.records && k.element_type() != ffi::DataType::BF16) {
    return invalid_argument(kOp, "k is neither bfloat16 nor uint8");
  }
  if (params.records && dim != 576) return invalid_argument(kOp, "D of records is not 576");
  DSA_FFI_RETURN_IF_ERROR(check_shape(
      kOp, "k", k.dimensions(), {}, {pools, rows, groups, params.records ? kMlaRecordBytes : dim}));
  const int64_t value_dim = present(v) ? dim : 512;
  const void* values = nullptr;
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "v", v, ffi::DataType::BF16, {pools, rows, groups, value_dim}, &values));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "starts", starts.dimensions(), {}, {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ends", ends.dimensions(), {}, {batch, queries}));
  params.batch = batch;
  params.queries = queries;
  params.heads = static_cast<int>(heads);
  params.groups = static_cast<int>(groups);
  params.dim = static_cast<int>(dim);
  params.value_dim = static_cast<int>(value_dim);
  params.batch_rows = pools == 1 ? 0 : rows;
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  params.keys = rows;
  if (present(page_table)) {
    const int64_t page_slots = page_table.dimensions()[1];
    if (page_size <= 0 || rows % page_size != 0 || rows > kMax || page_slots > kMax) {
      return invalid_argument(kOp, "k's rows are no whole pages, or exceed 2^31 - 1");
    }
    DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "page_table", page_table, ffi::DataType::S32,
                                          {batch, page_slots}, &params.page_table));
    params.pages = static_cast<int>(rows / page_size);
    params.page_size = page_size;
    params.page_slots = static_cast<int>(page_slots);
    params.keys = page_slots * page_size;
  }
  const bool floats = top->dimensions().size() > 1;
  if (out->element_type() != (floats ? ffi::DataType::F32 : ffi::DataType::BF16)) {
    return invalid_argument(kOp, "out has a wrong dtype");
  }
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "out", out->dimensions(), {}, {batch, queries, heads, value_dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse->dimensions(), {}, {batch, queries, heads}));
  if (floats) {
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "top", top->dimensions(), {}, {batch, queries, heads}));
    params.top = top->typed_data();
  }
  const MqaDecodeWorkspace room = mqa_decode_workspace(
      mqa_decode_rows(queries, params.heads, params.groups, params.dim, params.records));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "partial", partial->dimensions(), {}, {room.rows, value_dim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "partial_rows", partial_rows->dimensions(), {}, {room.rows, 2}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "cuts", cuts->dimensions(), {}, {room.cuts, 2}));
  params.q = q.untyped_data();
  params.k = k.untyped_data();
  params.v = values;
  params.starts = starts.typed_data();
  params.ends = ends.typed_data();
  params.out = out->untyped_data();
  params.lse = lse->typed_data();
  params.partial = partial->typed_data();
  params.partial_rows = reinterpret_cast<float2*>(partial_rows->typed_data());
  params.cuts = reinterpret_cast<int2*>(cuts->typed_data());
  return launch_status(kOp, launch_mqa_decode(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(MqaDecode, jax_dsa::mqa_decode,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("page_size"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
