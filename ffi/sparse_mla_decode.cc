// Handler of sparse MLA decode.

#include "sparse_mla/sparse_mla_decode.h"

#include <algorithm>
#include <limits>

#include "common/device.h"
#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D], kv [B, S, G, D] or [1, S, G, D] for all requests; with a page table
// [B or 1, P * page_size, G, D] (uint8: records of 656 bytes in place of D values), indices
// [B, T, G, K], ends [B, T]?, topk_length [B, T]?, sinks [B, N]?, page_table [B, M]?
// -> out [B, T, N, 512], lse [B, T, N], and if splits > 1 the workspace partial
//    [B * T * G * ceil(N / G / 64), splits, 64, 512] and partial_lse, the same without 512
// `splits` is the most parts there may be; a device with few SMs gets fewer, but for
// `batch_invariant`.
ffi::Error sparse_mla_decode(cudaStream_t stream, ffi::Buffer<ffi::BF16> q, ffi::AnyBuffer kv,
                             ffi::Buffer<ffi::S32> indices, ffi::AnyBuffer ends,
                             ffi::AnyBuffer topk_length, ffi::AnyBuffer sinks,
                             ffi::AnyBuffer page_table, ffi::Result<ffi::Buffer<ffi::BF16>> out,
                             ffi::Result<ffi::Buffer<ffi::F32>> lse, ffi::RemainingRets workspace,
                             float scale, int32_t page_size, int32_t splits, bool batch_invariant) {
  constexpr const char* kOp = "sparse_mla_decode";
  const bool records = kv.element_type() == ffi::DataType::U8, paged = present(page_table);
  if (!records && kv.element_type() != ffi::DataType::BF16) {
    return invalid_argument(kOp, "kv is neither bfloat16 nor uint8");
  }
  const bool shared = kv.dimensions().size() > 0 && kv.dimensions()[0] == 1;
  SparseMlaDecodeParams params = {};
  DSA_FFI_RETURN_IF_ERROR(
      read_operands(kOp, q, kv, indices, ends, topk_length, &params,
                    {.shared = shared, .record_bytes = records ? kMlaRecordBytes : 0}));
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  DSA_FFI_RETURN_IF_ERROR(read_results(kOp, out, lse, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  if (records && params.dim != 576) return invalid_argument(kOp, "D of records is not 576");
  if (splits < 1 || splits > kSparseMlaMaxSplits) return invalid_argument(kOp, "splits not 1..64");
  const int64_t batch = params.batch, queries = params.queries, rows = params.keys;
  params.batch_rows = shared ? 0 : rows;
  params.records = records;
  if (paged) {
    constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
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
  params.splits = 1;
  if (splits > 1) {
    if (workspace.size() != 2) return invalid_argument(kOp, "wants a workspace of two arrays");
    const auto partial = workspace.get<ffi::Buffer<ffi::F32>>(0);
    const auto partial_lse = workspace.get<ffi::Buffer<ffi::F32>>(1);
    if (partial.has_error()) return partial.error();
    if (partial_lse.has_error()) return partial_lse.error();
    ffi::Result<ffi::Buffer<ffi::F32>> x = partial.value(), y = partial_lse.value();
    const int64_t items = sparse_mla_decode_items(batch, queries, params.heads, params.groups);
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "partial", x->dimensions(), {},
                                        {items, splits, 64, int64_t{kMlaValueDim}}));
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "partial_lse", y->dimensions(), {}, {items, splits, 64}));
    params.partial = x->typed_data();
    params.partial_lse = y->typed_data();
    Device device;
    if (cudaError_t e = current_device(&device); e != cudaSuccess) return launch_status(kOp, e);
    const int fastest = sparse_mla_decode_splits(items, params.slots, device.num_sms);
    params.splits = batch_invariant ? splits : std::min(splits, fastest);
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
                                  .Attr<int32_t>("splits")
                                  .Attr<bool>("batch_invariant"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
