// Handler of sparse MLA decode.

#include "sparse_mla/sparse_mla_decode.h"

#include <algorithm>

#include "common/device.h"
#include "common/limits.h"
#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D]; kv [B, S, G, D], or [1, S, G, D] shared by all requests; with a page table
// [B or 1, P * page_size, G, D]; FP8 records are uint8 [..., 656]; indices [B, T, G, K],
// ends [B, T]?, topk_length [B, T]?, sinks [B, N]?, page_table [B, R]?
// -> out [B, T, N, 512], max_logit and log_sum [B, T, N], and if splits > 1 the workspaces
//    partial [B * T * G * ceil(N / G / 64), splits, 64, 512] and partial_rows, the same with 2 in
//    place of 512
//
// `splits` is the largest number of KV splits that the workspaces have space for. A device with few
// SMs uses fewer, unless `batch_invariant` asks for exactly this number.
ffi::Error sparse_mla_decode(cudaStream_t stream, BF16 q, AnyBuffer kv, S32 indices, AnyBuffer ends,
                             AnyBuffer topk_length, AnyBuffer sinks, AnyBuffer page_table,
                             Result<BF16> out, Result<F32> max_logit, Result<F32> log_sum,
                             Result<F32> partial, Result<F32> partial_rows,
                             Attr<float, "scale"> scale, Attr<int32_t, "page_size"> page_size,
                             Attr<int32_t, "splits"> splits,
                             Attr<bool, "batch_invariant"> batch_invariant) {
  constexpr const char* kOp = "sparse_mla_decode";
  namespace limits = ::jax_dsa::limits::sparse_mla;
  DSA_FFI_RETURN_IF_ERROR(
      check_dtype(kOp, "kv", kv.element_type(), {DataType::BF16, DataType::U8}));
  const bool records = kv.element_type() == DataType::U8;
  const bool shared = kv.dimensions().size() > 0 && kv.dimensions()[0] == 1;
  SparseMlaDecodeParams params = {};
  DSA_FFI_RETURN_IF_ERROR(
      read_operands(kOp, q, kv, indices, ends, topk_length, &params,
                    {.shared = shared, .record_bytes = records ? kMlaRecordBytes : 0}));
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  DSA_FFI_RETURN_IF_ERROR(read_results(kOp, *out, *max_logit, *log_sum, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  if (records) {
    DSA_FFI_RETURN_IF_ERROR(
        check_one_of(kOp, "D of FP8 records", params.dim, {limits::kRecordDim}));
  }
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "K", params.slots, 0, limits::kMaxDecodeSlots));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "splits", splits, 1, kSparseMlaMaxSplits));
  const int64_t rows = params.keys;
  params.batch_rows = shared ? 0 : rows;
  params.records = records;
  DSA_FFI_RETURN_IF_ERROR(read_page_table(kOp, "kv", page_table, rows, page_size, &params));
  params.splits = 1;
  if (splits > 1) {
    const int64_t items =
        sparse_mla_decode_work_tiles(params.batch, params.queries, params.heads, params.groups);
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "partial", partial->dimensions(),
                                        {items, splits, limits::kTileSlots, limits::kValueDim}));
    DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "partial_rows", partial_rows->dimensions(),
                                        {items, splits, limits::kTileSlots, 2}));
    params.partial = partial->typed_data();
    params.partial_rows = reinterpret_cast<float2*>(partial_rows->typed_data());
    Device device;
    if (cudaError_t e = current_device(&device); e != cudaSuccess) return launch_status(kOp, e);
    const int fastest =
        sparse_mla_decode_splits(items, params.slots, std::min(device.num_sms, kMaxSms));
    params.splits = batch_invariant ? splits.value : std::min(splits.value, fastest);
  }
  return launch_status(kOp, launch_sparse_mla_decode(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.sparse_mla_decode.v4", sparse_mla_decode, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
