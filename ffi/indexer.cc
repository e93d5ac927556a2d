// Handlers of the indexer.

#include "indexer/indexer.h"

#include <algorithm>
#include <limits>

#include "ffi/common.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

using BF16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using U32 = ffi::Buffer<ffi::U32>;
using Dims = ffi::Span<const int64_t>;

struct Sizes {
  int64_t batch, queries, keys, heads, channels;
};

// Checks q [B, T, J, C], k [B, S, C] - a pool of S keys may be all requests' - and weights [B, T,
// J].
ffi::Error read_sizes(const char* op, Dims q_dims, Dims k_dims, Dims weights_dims, Sizes* sizes,
                      bool paged = false) {
  if (q_dims.size() != 4) return invalid_argument(op, "q is not of rank 4");
  if (k_dims.size() != 3) return invalid_argument(op, "k is not of rank 3");
  *sizes = {q_dims[0], q_dims[1], k_dims[1], q_dims[2], q_dims[3]};
  const auto& [batch, queries, keys, heads, channels] = *sizes;
  if (heads < 1 || heads > kIndexerMaxHeads) return invalid_argument(op, "J is not in 1 .. 64");
  if (channels != 32 && channels != 64 && channels != 128) {
    return invalid_argument(op, "C is not 32, 64 or 128");
  }
  if (keys > std::numeric_limits<int32_t>::max() - 4096) {
    return invalid_argument(op, "S exceeds 2^31 - 4097");
  }
  const int64_t pools = paged && k_dims[0] == 1 ? 1 : batch;
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "k", k_dims, {}, {pools, keys, channels}));
  return check_shape(op, "weights", weights_dims, {}, {batch, queries, heads});
}

// Checks the forward kernels' operands, and gathers them.
ffi::Error read_operands(const char* op, ffi::AnyBuffer q, ffi::AnyBuffer k, F32 weights,
                         ffi::AnyBuffer k_scale, S32 starts, S32 ends, bool relu,
                         IndexerFwdParams* params, bool paged = false) {
  const ffi::DataType dtype = q.element_type();
  if (k.element_type() != dtype) return invalid_argument(op, "k has another dtype than q");
  if (dtype != ffi::DataType::BF16 && dtype != ffi::DataType::F8E4M3FN) {
    return invalid_argument(op, "q is neither bf16 nor e4m3");
  }
  Sizes sizes;
  DSA_FFI_RETURN_IF_ERROR(
      read_sizes(op, q.dimensions(), k.dimensions(), weights.dimensions(), &sizes, paged));
  const auto& [batch, queries, keys, heads, channels] = sizes;
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "starts", starts.dimensions(), {}, {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "ends", ends.dimensions(), {}, {batch, queries}));
  *params = {
      .q = q.untyped_data(),
      .k = k.untyped_data(),
      .weights = weights.typed_data(),
      .starts = starts.typed_data(),
      .ends = ends.typed_data(),
      .batch = batch,
      .queries = queries,
      .keys = keys,
      .heads = static_cast<int>(heads),
      .channels = static_cast<int>(channels),
      .dtype = dtype == ffi::DataType::BF16 ? IndexerDType::kBF16 : IndexerDType::kE4M3,
      .relu = relu,
  };
  return optional_data(op, "k_scale", k_scale, ffi::DataType::F32, {k.dimensions()[0], keys},
                       &params->k_scale);
}

// q [B, T, J, C], k [B, S, C], weights [B, T, J], k_scale [B, S]?, starts [B, T], ends [B, T]
// -> out [B, T, S]
ffi::Error indexer_logits_fwd(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, F32 weights,
                              ffi::AnyBuffer k_scale, S32 starts, S32 ends, ffi::Result<F32> out,
                              bool relu) {
  constexpr const char* kOp = "indexer_logits_fwd";
  IndexerFwdParams params;
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, k, weights, k_scale, starts, ends, relu, &params));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "out", out->dimensions(), {}, {params.batch, params.queries, params.keys}));
  params.out = out->typed_data();
  params.whole_rows = true;
  return launch_status(kOp, launch_indexer_fwd(params, stream));
}

// The operands of indexer_logits_fwd; with page_table [B, R] k is [1 or B, pool, C], k_scale
// likewise
// -> indices and values [B, T, K], workspace of any size >= S
ffi::Error indexer_topk_fwd(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, F32 weights,
                            ffi::AnyBuffer k_scale, S32 starts, S32 ends, ffi::AnyBuffer page_table,
                            ffi::Result<S32> indices, ffi::Result<F32> values,
                            ffi::Result<F32> logits, bool relu, int64_t page_size) {
  constexpr const char* kOp = "indexer_topk_fwd";
  IndexerTopkParams params;
  IndexerFwdParams& p = params.logits;
  const bool paged = present(page_table);
  DSA_FFI_RETURN_IF_ERROR(
      read_operands(kOp, q, k, weights, k_scale, starts, ends, relu, &p, paged));
  if (paged) {
    if (page_table.dimensions().size() != 2) {
      return invalid_argument(kOp, "page_table is not of rank 2");
    }
    p.pages_per_request = page_table.dimensions()[1];
    DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "page_table", page_table, ffi::DataType::S32,
                                          {p.batch, p.pages_per_request}, &p.page_table));
    if (page_size <= 0 || page_size % kIndexerPageMultiple != 0 ||
        page_size >
            std::numeric_limits<int32_t>::max() / std::max(p.pages_per_request, int64_t{1})) {
      return invalid_argument(kOp, "page_size is not a multiple of 64, or too large");
    }
    p.page_size = static_cast<int>(page_size);
    p.pools = k.dimensions()[0];
    if (p.keys % page_size != 0) return invalid_argument(kOp, "the pool is not of whole pages");
    p.pages = static_cast<int>(p.keys / page_size);
    p.keys = p.pages_per_request * page_size;
  }
  if (indices->dimensions().size() != 3) return invalid_argument(kOp, "indices is not of rank 3");
  params.k = indices->dimensions()[2];
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "indices", indices->dimensions(), {}, {p.batch, p.queries, params.k}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "values", values->dimensions(), {}, {p.batch, p.queries, params.k}));
  p.out = logits->typed_data();
  params.capacity = static_cast<int64_t>(logits->element_count());
  if (params.capacity < std::max<int64_t>(p.keys, 1)) {
    return invalid_argument(kOp, "the workspace has no room for a query's logits");
  }
  params.indices = indices->typed_data();
  params.values = values->typed_data();
  return launch_status(kOp, launch_indexer_topk(params, stream));
}

// q [B, T, J, C], k [B, S, C], weights [B, T, J], k_scale [B, S]?, indices and grad [B, T, K]
// -> dq, dk f32, dweights, dk_scale?, workspace [B, T, K in multiples of 64, 2]
ffi::Error indexer_topk_bwd(cudaStream_t stream, BF16 q, BF16 k, F32 weights,
                            ffi::AnyBuffer k_scale, S32 indices, F32 grad, ffi::Result<BF16> dq,
                            ffi::Result<F32> dk, ffi::Result<F32> dweights,
                            ffi::Result<F32> dk_scale, ffi::Result<U32> gates, bool relu) {
  constexpr const char* kOp = "indexer_topk_bwd";
  Sizes sizes;
  DSA_FFI_RETURN_IF_ERROR(
      read_sizes(kOp, q.dimensions(), k.dimensions(), weights.dimensions(), &sizes));
  const auto& [batch, queries, keys, heads, channels] = sizes;
  if (indices.dimensions().size() != 3) return invalid_argument(kOp, "indices is not of rank 3");
  const int64_t slots = indices.dimensions()[2];
  if (slots > kIndexerBwdMaxSlots) return invalid_argument(kOp, "K exceeds 8192");
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "indices", indices.dimensions(), {}, {batch, queries, slots}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "grad", grad.dimensions(), {}, {batch, queries, slots}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dq", dq->dimensions(), q.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dk", dk->dimensions(), k.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "dweights", dweights->dimensions(), weights.dimensions(), {}));
  if (static_cast<int64_t>(gates->element_count()) !=
      2 * indexer_bwd_gates_words(batch * queries, slots)) {
    return invalid_argument(kOp, "the workspace has a wrong size");
  }
  IndexerBwdParams params = {
      .q = q.untyped_data(),
      .k = k.untyped_data(),
      .weights = weights.typed_data(),
      .indices = indices.typed_data(),
      .grad = grad.typed_data(),
      .dq = dq->untyped_data(),
      .dk = dk->typed_data(),
      .dweights = dweights->typed_data(),
      .gates = reinterpret_cast<uint64_t*>(gates->typed_data()),
      .batch = batch,
      .queries = queries,
      .keys = keys,
      .slots = static_cast<int>(slots),
      .heads = static_cast<int>(heads),
      .channels = static_cast<int>(channels),
      .relu = relu,
  };
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "k_scale", k_scale, ffi::DataType::F32, {batch, keys}, &params.k_scale));
  if (present(k_scale)) {
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "dk_scale", dk_scale->dimensions(), k_scale.dimensions(), {}));
    params.dk_scale = dk_scale->typed_data();
  }
  return launch_status(kOp, launch_indexer_bwd(params, stream));
}

// The stream, and what `read_operands` reads.
auto bind_operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<F32>()
      .Arg<ffi::AnyBuffer>()
      .Arg<S32>()
      .Arg<S32>();
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(IndexerLogitsFwd, jax_dsa::indexer_logits_fwd,
                              jax_dsa::bind_operands().Ret<jax_dsa::F32>().Attr<bool>("relu"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(IndexerTopkFwd, jax_dsa::indexer_topk_fwd,
                              jax_dsa::bind_operands()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<jax_dsa::S32>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::F32>()
                                  .Attr<bool>("relu")
                                  .Attr<int64_t>("page_size"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(IndexerTopkBwd, jax_dsa::indexer_topk_bwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::F32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jax_dsa::S32>()
                                  .Arg<jax_dsa::F32>()
                                  .Ret<jax_dsa::BF16>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::U32>()
                                  .Attr<bool>("relu"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
