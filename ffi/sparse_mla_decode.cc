// Handler of sparse MLA decode.

#include "sparse_mla/sparse_mla_decode.h"

#include <algorithm>
#include <string>

#include "common/device.h"
#include "common/limits.h"
#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"

namespace jax_dsa {
namespace {

// Reads a cache and the list that selects from it. With D = 512 its records are page records.
template <typename Indices>
ffi::Error read_keys(const char* op, const BF16& q, const AnyBuffer& kv, const Indices& indices,
                     const AnyBuffer& ends, const AnyBuffer& topk_length,
                     const AnyBuffer& page_table, int64_t page_size,
                     SparseMlaDecodeParams* params) {
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, "kv", kv.element_type(), {DataType::BF16, DataType::U8}));
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, "indices", indices.element_type(), {DataType::S32}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "q", q.dimensions(), {"B", "T", "N", "D"}));
  params->records = kv.element_type() == DataType::U8;
  const bool page_records = params->records && q.dimensions()[3] != limits::sparse_mla::kRecordDim;
  KeyLayout layout = {.shared = kv.dimensions().size() > 0 && kv.dimensions()[0] == 1};
  if (params->records) layout.record_bytes = page_records ? kMlaPageRecordBytes : kMlaRecordBytes;
  DSA_FFI_RETURN_IF_ERROR(read_operands(op, q, kv, indices, ends, topk_length, params, layout));
  const int64_t rows = params->keys;
  params->batch_rows = layout.shared ? 0 : rows;
  DSA_FFI_RETURN_IF_ERROR(read_page_table(op, "kv", page_table, rows, page_size, params));
  const int64_t page_rows = present(page_table) ? page_size * params->groups : 0;
  if (page_records && (page_rows == 0 || page_rows % 2 != 0)) {
    return invalid_argument(op, "a page has " + std::to_string(page_rows) +
                                    " records of 584 bytes, expected an even number");
  }
  return ffi::Error::Success();
}

// Reads a second cache and its list, after the first one.
ffi::Error read_extra_keys(const BF16& q, const AnyBuffer& kv, const AnyBuffer& indices,
                           const AnyBuffer& ends, const AnyBuffer& topk_length,
                           const AnyBuffer& page_table, int64_t page_size,
                           SparseMlaDecodeParams* params) {
  constexpr const char* kOp = "sparse_mla_decode, second cache";
  SparseMlaDecodeParams x = {};
  DSA_FFI_RETURN_IF_ERROR(
      read_keys(kOp, q, kv, indices, ends, topk_length, page_table, page_size, &x));
  if (x.records != params->records || x.groups != params->groups) {
    return invalid_argument(kOp, "'kv' has another dtype or G than that of the first cache");
  }
  params->extra = {x.kv,         x.indices, x.ends,  x.topk_length, x.page_table, x.keys,
                   x.batch_rows, x.slots,   x.pages, x.page_size,   x.page_slots};
  return ffi::Error::Success();
}

// q [B, T, N, D]; kv [B, S, G, D], or [1, S, G, D] shared by all requests; with a page table
// [B or 1, P * page_size, G, D]; FP8 records are uint8 [..., 656], or with D = 512 and a page table
// [..., 584]; indices [B, T, G, K], ends [B, T]?, topk_length [B, T]?, sinks [B, N]?,
// page_table [B, R]?; extra_kv, extra_indices, extra_ends, extra_topk_length and extra_page_table,
// the same of a second cache, or none of them
// -> out [B, T, N, 512], max_logit and log_sum [B, T, N], and if splits > 1 the workspaces
//    partial [B * T * G * ceil(N / G / 64), splits, 64, 512] and partial_rows, the same with 2 in
//    place of 512
//
// `splits` is the largest number of KV splits that the workspaces have space for. A device with few
// SMs uses fewer, unless `batch_invariant` asks for exactly this number.
ffi::Error sparse_mla_decode(cudaStream_t stream, BF16 q, AnyBuffer kv, S32 indices, AnyBuffer ends,
                             AnyBuffer topk_length, AnyBuffer sinks, AnyBuffer page_table,
                             AnyBuffer extra_kv, AnyBuffer extra_indices, AnyBuffer extra_ends,
                             AnyBuffer extra_topk_length, AnyBuffer extra_page_table,
                             Result<BF16> out, Result<F32> max_logit, Result<F32> log_sum,
                             Result<F32> partial, Result<F32> partial_rows,
                             Attr<float, "scale"> scale, Attr<int32_t, "page_size"> page_size,
                             Attr<int32_t, "extra_page_size"> extra_page_size,
                             Attr<int32_t, "splits"> splits,
                             Attr<bool, "batch_invariant"> batch_invariant) {
  constexpr const char* kOp = "sparse_mla_decode";
  namespace limits = ::jax_dsa::limits::sparse_mla;
  SparseMlaDecodeParams params = {};
  DSA_FFI_RETURN_IF_ERROR(
      read_keys(kOp, q, kv, indices, ends, topk_length, page_table, page_size, &params));
  if (present(extra_kv)) {
    DSA_FFI_RETURN_IF_ERROR(read_extra_keys(q, extra_kv, extra_indices, extra_ends,
                                            extra_topk_length, extra_page_table, extra_page_size,
                                            &params));
  }
  DSA_FFI_RETURN_IF_ERROR(read_sinks(kOp, sinks, &params));
  DSA_FFI_RETURN_IF_ERROR(read_results(kOp, *out, *max_logit, *log_sum, &params));
  DSA_FFI_RETURN_IF_ERROR(read_scale(kOp, scale, &params));
  const int64_t slots = sparse_mla_decode_slots(params.slots, params.extra.slots);
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "K", slots, 0, limits::kMaxDecodeSlots));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "splits", splits, 1, kSparseMlaMaxSplits));
  params.batch_invariant = batch_invariant;
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
        sparse_mla_decode_splits(items, static_cast<int>(slots), std::min(device.num_sms, kMaxSms));
    params.splits = batch_invariant ? splits.value : std::min(splits.value, fastest);
  }
  return launch_status(kOp, launch_sparse_mla_decode(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.sparse_mla_decode.v5", sparse_mla_decode, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
