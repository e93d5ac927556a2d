// Handler of sparse MLA decode.

#include "sparse_mla/sparse_mla_decode.h"

#include <limits>

#include "ffi/common.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D] or [1, S, G, D] for all requests; with a page table
// [1, P * page_size, G, D] (uint8: records of 656 bytes in place of D values), indices [B, T, G,
// K], ends [B, T]?, topk_length [B, T]?, sinks [B, N]?, page_table [B, M]?
// -> out [B, T, N, 512], lse [B, T, N], and if splits > 1 the workspace partial
//    [B * T * G * ceil(N / G / 64), splits, 64, 512] and partial_lse, the same without 512
ffi::Error sparse_mla_decode(cudaStream_t stream, ffi::Buffer<ffi::BF16> q, ffi::AnyBuffer kv,
                             ffi::Buffer<ffi::S32> indices, ffi::AnyBuffer ends,
                             ffi::AnyBuffer topk_length, ffi::AnyBuffer sinks,
                             ffi::AnyBuffer page_table, ffi::Result<ffi::Buffer<ffi::BF16>> out,
                             ffi::Result<ffi::Buffer<ffi::F32>> lse, ffi::RemainingRets workspace,
                             float scale, int32_t page_size, int32_t splits) {
  constexpr const char* kOp = "sparse_mla_decode";
  if (q.dimensions().size() != 4) return invalid_argument(kOp, "q is not of rank 4");
  if (kv.dimensions().size() != 4) return invalid_argument(kOp, "kv is not of rank 4");
  if (indices.dimensions().size() != 4) return invalid_argument(kOp, "indices is not of rank 4");
  const int64_t batch = q.dimensions()[0], queries = q.dimensions()[1], heads = q.dimensions()[2];
  const int64_t dim = q.dimensions()[3], rows = kv.dimensions()[1], groups = kv.dimensions()[2];
  const int64_t slots = indices.dimensions()[3];
  const bool records = kv.element_type() == ffi::DataType::U8, paged = present(page_table);
  if (!records && kv.element_type() != ffi::DataType::BF16) {
    return invalid_argument(kOp, "kv is neither bfloat16 nor uint8");
  }
  if (dim != 576 && (dim != 512 || records)) {
    return invalid_argument(kOp, "D is neither 576 nor (in bfloat16) 512");
  }
  if (groups == 0 || heads % groups != 0) return invalid_argument(kOp, "N is no multiple of G");
  if (!(scale > 0.f)) return invalid_argument(kOp, "the scale is not positive");
  if (splits < 1 || splits > kSparseMlaMaxSplits) return invalid_argument(kOp, "splits not 1..64");
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (heads > kMax || slots > kMax) return invalid_argument(kOp, "N or K exceeds 2^31 - 1");
  const bool shared = paged || kv.dimensions()[0] == 1;
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "kv", kv.dimensions(), {},
                  {shared ? 1 : batch, rows, groups, records ? kSparseMlaRecordBytes : dim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "indices", indices.dimensions(), {}, {batch, queries, groups, slots}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), {},
                                      {batch, queries, heads, int64_t{kSparseMlaValueDim}}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse->dimensions(), {}, {batch, queries, heads}));
  const int64_t sinks_batch = present(sinks) ? sinks.dimensions()[0] : 1;
  if (sinks_batch != 1 && sinks_batch != batch) {
    return invalid_argument(kOp, "sinks has another batch size than q");
  }
  SparseMlaDecodeParams params = {};
  params.q = q.untyped_data();
  params.kv = kv.untyped_data();
  params.indices = indices.typed_data();
  params.out = out->untyped_data();
  params.lse = lse->typed_data();
  params.batch = batch;
  params.queries = queries;
  params.keys = rows;
  params.heads = static_cast<int>(heads);
  params.groups = static_cast<int>(groups);
  params.slots = static_cast<int>(slots);
  params.dim = static_cast<int>(dim);
  params.sinks_stride = static_cast<int>(sinks_batch == 1 ? 0 : heads);
  params.scale = scale;
  params.batch_rows = shared ? 0 : rows;
  params.records = records;
  params.splits = splits;
  if (paged) {
    const int64_t page_slots = page_table.dimensions()[1];
    if (page_size <= 0 || rows % page_size != 0 || rows > kMax || page_slots > kMax) {
      return invalid_argument(kOp, "kv's rows are no whole pages, or exceed 2^31 - 1");
    }
    DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "page_table", page_table, ffi::DataType::S32,
                                          {batch, page_slots}, &params.page_table));
    params.pages = static_cast<int>(rows / page_size);
    params.page_size = page_size;
    params.page_slots = static_cast<int>(page_slots);
    params.keys = page_slots * page_size;
  }
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "ends", ends, ffi::DataType::S32, {batch, queries}, &params.ends));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "topk_length", topk_length, ffi::DataType::S32,
                                        {batch, queries}, &params.topk_length));
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "sinks", sinks, ffi::DataType::F32, {sinks_batch, heads}, &params.sinks));
  if (splits > 1) {
    if (workspace.size() != 2) return invalid_argument(kOp, "wants a workspace of two arrays");
    const auto partial = workspace.get<ffi::Buffer<ffi::F32>>(0);
    const auto partial_lse = workspace.get<ffi::Buffer<ffi::F32>>(1);
    if (partial.has_error()) return partial.error();
    if (partial_lse.has_error()) return partial_lse.error();
    ffi::Result<ffi::Buffer<ffi::F32>> x = partial.value(), y = partial_lse.value();
    const int64_t items = sparse_mla_decode_items(batch, queries, params.heads, params.groups);
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "partial", x->dimensions(), {},
                                        {items, splits, 64, int64_t{kSparseMlaValueDim}}));
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "partial_lse", y->dimensions(), {}, {items, splits, 64}));
    params.partial = x->typed_data();
    params.partial_lse = y->typed_data();
  }
  return launch_status(kOp, launch_sparse_mla_decode(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseMlaDecode, jax_dsa::sparse_mla_decode,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingRets()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("page_size")
                                  .Attr<int32_t>("splits"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
