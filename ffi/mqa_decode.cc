// Handler of mqa_decode.

#include "mqa_decode/mqa_decode.h"

#include "ffi/common.h"
#include "ffi/sparse_mla_operands.h"

namespace jax_dsa {
namespace {

// q [B, T, N, D]; k [B, S, G, D], or [1, S, G, D] shared by all requests; with a page table
// [B or 1, P * page_size, G, D]; FP8 records are uint8 [..., 656]; v like k with E in place of D,
// or absent: the values are then the first 512 elements of the keys; starts [B, T], ends [B, T],
// sinks [B, N]?, page_table [B, R]?, plan [1, kMqaDecodePlanRanges, 8]?
// -> out [B, T, N, E], bfloat16 or float32, max_logit and log_sum [B, T, N], and the workspaces
//    partial, partial_rows and split_tiles, whose sizes mqa_decode_workspace returns
ffi::Error mqa_decode(cudaStream_t stream, BF16 q, AnyBuffer k, AnyBuffer v, S32 starts, S32 ends,
                      AnyBuffer sinks, AnyBuffer page_table, AnyBuffer plan, Result<AnyBuffer> out,
                      Result<F32> max_logit, Result<F32> log_sum, Result<F32> partial,
                      Result<F32> partial_rows, Result<S32> split_tiles, Attr<float, "scale"> scale,
                      Attr<int32_t, "page_size"> page_size, Attr<bool, "exact_max"> exact_max) {
  constexpr const char* kOp = "mqa_decode";
  namespace limits = ::jax_dsa::limits::mqa_decode;
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "q", q.dimensions(), {"B", "T", "N", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "k", k.dimensions(), {"B or 1", "S", "G", "D"}));
  const int64_t batch = q.dimensions()[0], queries = q.dimensions()[1], heads = q.dimensions()[2];
  const int64_t dim = q.dimensions()[3], pools = k.dimensions()[0], rows = k.dimensions()[1];
  const int64_t groups = k.dimensions()[2];
  MqaDecodeParams params = {};
  DSA_FFI_RETURN_IF_ERROR(check_dtype(kOp, "k", k.element_type(), {DataType::BF16, DataType::U8}));
  params.records = k.element_type() == DataType::U8;
  DSA_FFI_RETURN_IF_ERROR(check_groups(kOp, heads, groups));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(kOp, "the batch size of 'k'", pools, {1, batch}));
  if (present(v)) {
    DSA_FFI_RETURN_IF_ERROR(check_one_of(kOp, "D of keys with values", dim, limits::kDims));
  } else {
    DSA_FFI_RETURN_IF_ERROR(check_one_of(kOp, "D of keys without 'v'", dim, limits::kLatentDims));
  }
  if (params.records) {
    DSA_FFI_RETURN_IF_ERROR(
        check_one_of(kOp, "D of FP8 records", dim, {::jax_dsa::limits::sparse_mla::kRecordDim}));
  }
  DSA_FFI_RETURN_IF_ERROR(check_shape(
      kOp, "k", k.dimensions(), {pools, rows, groups, params.records ? kMlaRecordBytes : dim}));
  const int64_t value_dim = present(v) ? dim : limits::kValueDim;
  const void* values = nullptr;
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "v", v, DataType::BF16, {pools, rows, groups, value_dim}, &values));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "starts", starts.dimensions(), {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ends", ends.dimensions(), {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "B * T * N", batch * queries * heads, 0, limits::kMaxRows));
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
  DSA_FFI_RETURN_IF_ERROR(read_page_table(kOp, "k", page_table, rows, page_size, &params));
  const void* ranges = nullptr;
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "plan", plan, DataType::S32,
                                        {1, kMqaDecodePlanRanges, limits::kPlanFields}, &ranges));
  params.plan = static_cast<const MqaDecodeRange*>(ranges);
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "the number of keys of a request", params.keys, 0, limits::kMaxRows));
  DSA_FFI_RETURN_IF_ERROR(
      check_dtype(kOp, "out", out->element_type(), {DataType::BF16, DataType::F32}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "out", out->dimensions(), {batch, queries, heads, value_dim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "max_logit", max_logit->dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "log_sum", log_sum->dimensions(), {batch, queries, heads}));
  params.out_float = out->element_type() == DataType::F32;
  params.exact_max = exact_max;
  const MqaDecodeWorkspace workspace = mqa_decode_workspace(
      mqa_decode_rows(queries, params.heads, params.groups, params.dim, params.records));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "partial", partial->dimensions(), {workspace.rows, value_dim}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "partial_rows", partial_rows->dimensions(), {workspace.rows, 2}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "split_tiles", split_tiles->dimensions(), {workspace.split_tiles, 2}));
  params.q = q.untyped_data();
  params.k = k.untyped_data();
  params.v = values;
  params.starts = starts.typed_data();
  params.ends = ends.typed_data();
  params.out = out->untyped_data();
  params.max_logit = max_logit->typed_data();
  params.log_sum = log_sum->typed_data();
  params.partial = partial->typed_data();
  params.partial_rows = reinterpret_cast<float2*>(partial_rows->typed_data());
  params.split_tiles = reinterpret_cast<int2*>(split_tiles->typed_data());
  return launch_status(kOp, launch_mqa_decode(params, stream));
}

// starts [C, B, T], ends [C, B, T], for C plans -> ranges [C, kMqaDecodePlanRanges, 8]
ffi::Error mqa_decode_plan(cudaStream_t stream, S32 starts, S32 ends, Result<S32> ranges,
                           Attr<int32_t, "heads"> heads, Attr<int32_t, "groups"> groups,
                           Attr<int32_t, "dim"> dim, Attr<bool, "records"> records) {
  constexpr const char* kOp = "mqa_decode_plan";
  namespace limits = ::jax_dsa::limits::mqa_decode;
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "starts", starts.dimensions(), {"C", "B", "T"}));
  const int64_t plans = starts.dimensions()[0], batch = starts.dimensions()[1];
  const int64_t queries = starts.dimensions()[2];
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ends", ends.dimensions(), {plans, batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "ranges", ranges->dimensions(),
                                      {plans, kMqaDecodePlanRanges, limits::kPlanFields}));
  DSA_FFI_RETURN_IF_ERROR(check_groups(kOp, heads, groups));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "N", heads, 0, limits::kMaxRows));
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "B * T * N", batch * queries * heads, 0, limits::kMaxRows));
  MqaDecodeParams params = {};
  params.batch = batch;
  params.queries = queries;
  params.heads = heads;
  params.groups = groups;
  params.dim = dim;
  params.records = records;
  params.keys = limits::kMaxRows;
  for (int64_t i = 0; i < plans; ++i) {
    params.starts = starts.typed_data() + i * batch * queries;
    params.ends = ends.typed_data() + i * batch * queries;
    auto* const plan =
        reinterpret_cast<MqaDecodeRange*>(ranges->typed_data()) + i * kMqaDecodePlanRanges;
    DSA_FFI_RETURN_IF_ERROR(launch_status(kOp, launch_mqa_decode_plan(params, plan, stream)));
  }
  return ffi::Error::Success();
}

DSA_FFI_HANDLER("jax_dsa.mqa_decode.v4", mqa_decode, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.mqa_decode_plan.v1", mqa_decode_plan, kHopperOnly);

}  // namespace
}  // namespace jax_dsa
