// Handlers of the indexer.

#include "indexer/indexer.h"

#include <algorithm>

#include "ffi/block_operands.h"
#include "ffi/common.h"
#include "ffi/limits.h"

namespace jax_dsa {
namespace {

struct Sizes {
  int64_t batch, queries, keys, heads, channels;
};

// Checks q [B, T, J, C] and k [B, S, C]. With a page table, k is a pool of S rows, and its batch
// axis may have size 1: all requests then share the pool.
ffi::Error read_sizes(const char* op, Dims q, Dims k, Sizes* sizes, bool paged = false) {
  namespace limits = ::jax_dsa::limits::indexer;
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "q", q, {"B", "T", "J", "C"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "k", k, {"B", "S", "C"}));
  *sizes = {q[0], q[1], k[1], q[2], q[3]};
  const auto& [batch, queries, keys, heads, channels] = *sizes;
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "J", heads, 1, limits::kMaxHeads));
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "C", channels, limits::kChannels));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "S", keys, 0, limits::kMaxKeys));
  const int64_t pools = paged && k[0] == 1 ? 1 : batch;
  return check_shape(op, "k", k, {pools, keys, channels});
}

// Reads the operands that all forward handlers have. `dims` are the dimensions of q with one axis
// of heads.
ffi::Error read_products(const char* op, const AnyBuffer& q, Dims dims, const AnyBuffer& k,
                         const AnyBuffer& k_scale, bool relu, IndexerFwdParams* params,
                         bool paged = false) {
  const DataType dtype = q.element_type();
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, "q", dtype, {DataType::BF16, DataType::F8E4M3FN}));
  DSA_FFI_RETURN_IF_ERROR(check_dtype(op, "k", k.element_type(), {dtype}));
  Sizes sizes;
  DSA_FFI_RETURN_IF_ERROR(read_sizes(op, dims, k.dimensions(), &sizes, paged));
  const auto& [batch, queries, keys, heads, channels] = sizes;
  *params = {
      .q = q.untyped_data(),
      .k = k.untyped_data(),
      .batch = batch,
      .queries = queries,
      .keys = keys,
      .heads = static_cast<int>(heads),
      .channels = static_cast<int>(channels),
      .dtype = dtype == DataType::BF16 ? IndexerDType::kBF16 : IndexerDType::kE4M3,
      .relu = relu,
  };
  return optional_data(op, "k_scale", k_scale, DataType::F32, {k.dimensions()[0], keys},
                       &params->k_scale);
}

// Reads the operands of a logit of all heads.
ffi::Error read_products(const char* op, const AnyBuffer& q, const AnyBuffer& k, const F32& weights,
                         const AnyBuffer& k_scale, bool relu, IndexerFwdParams* params,
                         bool paged = false) {
  DSA_FFI_RETURN_IF_ERROR(read_products(op, q, q.dimensions(), k, k_scale, relu, params, paged));
  const auto& p = *params;
  params->weights = weights.typed_data();
  return check_shape(op, "weights", weights.dimensions(), {p.batch, p.queries, p.heads});
}

// Reads the end of each query's range.
ffi::Error read_ends(const char* op, const S32& ends, IndexerFwdParams* params) {
  params->ends = ends.typed_data();
  return check_shape(op, "ends", ends.dimensions(), {params->batch, params->queries});
}

// Reads the operands of the handlers whose heads select together.
ffi::Error read_operands(const char* op, const AnyBuffer& q, const AnyBuffer& k, const F32& weights,
                         const AnyBuffer& k_scale, const S32& starts, const S32& ends, bool relu,
                         IndexerFwdParams* params, bool paged = false) {
  DSA_FFI_RETURN_IF_ERROR(read_products(op, q, k, weights, k_scale, relu, params, paged));
  DSA_FFI_RETURN_IF_ERROR(read_ends(op, ends, params));
  params->starts = starts.typed_data();
  return check_shape(op, "starts", starts.dimensions(), {params->batch, params->queries});
}

// q [B, T, J, C], k [B, S, C], weights [B, T, J], k_scale [B, S]?, starts [B, T], ends [B, T]
// -> out [B, T, S]
ffi::Error indexer_logits_fwd(cudaStream_t stream, AnyBuffer q, AnyBuffer k, F32 weights,
                              AnyBuffer k_scale, S32 starts, S32 ends, Result<F32> out,
                              Attr<bool, "relu"> relu) {
  constexpr const char* kOp = "indexer_logits_fwd";
  IndexerFwdParams params;
  DSA_FFI_RETURN_IF_ERROR(read_operands(kOp, q, k, weights, k_scale, starts, ends, relu, &params));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "out", out->dimensions(), {params.batch, params.queries, params.keys}));
  params.out = out->typed_data();
  params.whole_rows = true;
  return launch_status(kOp, launch_indexer_fwd(params, stream));
}

// Reads the page table [B, R] over the pool, whose size `params->keys` is before the call. After
// it, `params->keys` is the number of keys that a request's pages hold.
ffi::Error read_pages(const char* op, const AnyBuffer& page_table, int64_t pools, int64_t page_size,
                      IndexerFwdParams* params) {
  namespace limits = ::jax_dsa::limits::indexer;
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "page_table", page_table.dimensions(), {"B", "R"}));
  const int64_t pages = page_table.dimensions()[1], rows = params->keys;
  DSA_FFI_RETURN_IF_ERROR(optional_data(op, "page_table", page_table, DataType::S32,
                                        {params->batch, pages}, &params->page_table));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "page_size", page_size, 1, limits::kMaxKeys));
  DSA_FFI_RETURN_IF_ERROR(check_multiple(op, "page_size", page_size, limits::kPageMultiple));
  DSA_FFI_RETURN_IF_ERROR(
      check_range(op, "the number of rows of the pool", rows, 1, limits::kMaxKeys));
  DSA_FFI_RETURN_IF_ERROR(check_multiple(op, "the number of rows of the pool", rows, page_size));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "R", pages, 0, limits::kMaxKeys / page_size));
  params->pages_per_request = pages;
  params->page_size = static_cast<int>(page_size);
  params->pools = pools;
  params->pages = static_cast<int>(rows / page_size);
  params->keys = pages * page_size;
  return ffi::Error::Success();
}

// The operands of indexer_logits_fwd and page_table [B, R]?; with a page table k is
// [B or 1, P * page_size, C] and k_scale [B or 1, P * page_size]. Checks also the shapes of a
// selection, indices and values [B, T, K].
ffi::Error read_selection(const char* op, const AnyBuffer& q, const AnyBuffer& k,
                          const F32& weights, const AnyBuffer& k_scale, const S32& starts,
                          const S32& ends, const AnyBuffer& page_table, Dims indices, Dims values,
                          bool relu, int64_t page_size, IndexerFwdParams* p) {
  const bool paged = present(page_table);
  DSA_FFI_RETURN_IF_ERROR(read_operands(op, q, k, weights, k_scale, starts, ends, relu, p, paged));
  if (paged) {
    DSA_FFI_RETURN_IF_ERROR(read_pages(op, page_table, k.dimensions()[0], page_size, p));
  }
  DSA_FFI_RETURN_IF_ERROR(
      check_range(op, "the number of keys of a request", p->keys, 0, limits::topk::kMaxSize));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "indices", indices, {"B", "T", "K"}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "indices", indices, {p->batch, p->queries, indices[2]}));
  return check_shape(op, "values", values, {p->batch, p->queries, indices[2]});
}

// The operands -> indices [B, T, K], values [B, T, K], and a workspace for the logits of at least
// one query
ffi::Error indexer_topk_fwd(cudaStream_t stream, AnyBuffer q, AnyBuffer k, F32 weights,
                            AnyBuffer k_scale, S32 starts, S32 ends, AnyBuffer page_table,
                            Result<S32> indices, Result<F32> values, Result<F32> logits,
                            Attr<bool, "relu"> relu, Attr<int64_t, "page_size"> page_size) {
  constexpr const char* kOp = "indexer_topk_fwd";
  IndexerTopkParams params;
  IndexerFwdParams& p = params.logits;
  DSA_FFI_RETURN_IF_ERROR(read_selection(kOp, q, k, weights, k_scale, starts, ends, page_table,
                                         indices->dimensions(), values->dimensions(), relu,
                                         page_size, &p));
  params.k = indices->dimensions()[2];
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "min(K, S)", std::min(params.k, p.keys), 0, limits::topk::kMaxSelected));
  DSA_FFI_RETURN_IF_ERROR(
      check_workspace(kOp, "logits", logits->size_bytes(), 4 * std::max<int64_t>(p.keys, 1)));
  p.out = logits->typed_data();
  params.capacity = static_cast<int64_t>(logits->element_count());
  params.indices = indices->typed_data();
  params.values = values->typed_data();
  return launch_status(kOp, launch_indexer_topk(params, stream));
}

// The operands of indexer_topk_fwd and candidates [B, T, M], numbers of blocks of block_size keys
// -> indices [B, T, K], values [B, T, K], and a workspace for the lists and logits of at least one
//    query
ffi::Error indexer_candidates_fwd(cudaStream_t stream, AnyBuffer q, AnyBuffer k, F32 weights,
                                  AnyBuffer k_scale, S32 starts, S32 ends, AnyBuffer page_table,
                                  S32 candidates, Result<S32> indices, Result<F32> values,
                                  Result<F32> workspace, Attr<bool, "relu"> relu,
                                  Attr<int64_t, "page_size"> page_size,
                                  Attr<int64_t, "block_size"> block_size) {
  constexpr const char* kOp = "indexer_candidates_fwd";
  IndexerCandidatesParams params = {};
  IndexerFwdParams& p = params.logits;
  DSA_FFI_RETURN_IF_ERROR(read_selection(kOp, q, k, weights, k_scale, starts, ends, page_table,
                                         indices->dimensions(), values->dimensions(), relu,
                                         page_size, &p));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "candidates", candidates.dimensions(), {"B", "T", "M"}));
  params.slots = candidates.dimensions()[2];
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "candidates", candidates.dimensions(), {p.batch, p.queries, params.slots}));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "block_size", block_size, 1, limits::kInt32Max));
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "S / block_size", ceil_div<int64_t>(p.keys, block_size),
                                      0, limits::indexer::kMaxCandidateBlocks));
  params.k = indices->dimensions()[2];
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "min(K, M * block_size)",
                  std::min(params.k, indexer_candidate_keys(p.keys, params.slots, block_size)), 0,
                  limits::topk::kMaxSelected));
  DSA_FFI_RETURN_IF_ERROR(
      check_workspace(kOp, "workspace", workspace->size_bytes(),
                      4 * indexer_candidates_row_words(p.keys, params.slots, block_size)));
  params.candidates = candidates.typed_data();
  params.block_size = static_cast<int>(block_size);
  params.workspace = workspace->typed_data();
  params.capacity = static_cast<int64_t>(workspace->element_count());
  params.indices = indices->typed_data();
  params.values = values->typed_data();
  return launch_status(kOp, launch_indexer_candidates(params, stream));
}

// q [B, T, J, C], k [B, S, C], weights [B, T, J], k_scale [B, S]?, indices [B, T, K]
// -> logits [B, T, K]
ffi::Error indexer_selected_fwd(cudaStream_t stream, AnyBuffer q, AnyBuffer k, F32 weights,
                                AnyBuffer k_scale, S32 indices, Result<F32> logits,
                                Attr<bool, "relu"> relu) {
  constexpr const char* kOp = "indexer_selected_fwd";
  IndexerSelectedParams params = {};
  IndexerFwdParams& p = params.logits;
  DSA_FFI_RETURN_IF_ERROR(read_products(kOp, q, k, weights, k_scale, relu, &p));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "indices", indices.dimensions(), {"B", "T", "K"}));
  params.slots = indices.dimensions()[2];
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "K", params.slots, 0, ::jax_dsa::limits::indexer::kMaxKeys));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "indices", indices.dimensions(), {p.batch, p.queries, params.slots}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "logits", logits->dimensions(), indices.dimensions(), {}));
  params.indices = indices.typed_data();
  p.out = logits->typed_data();
  return launch_status(kOp, launch_indexer_selected(params, stream));
}

// q [B, T, G, J, C], k [B, S, C], weights [B, T, G, J]?, k_scale [B, S]?, starts [B, T]?,
// ends [B, T] and page_table [B, R]?, with pages as in indexer_topk_fwd. Without weights J is 1 and
// every head has a list. With weights G is 1, and starts must be given.
// -> indices, logits and keys [B, T, G, K], a workspace for the scores of N lists and M blocks
//    [N, M, 2], and with weights one for the logits of N queries
ffi::Error indexer_block_topk_fwd(cudaStream_t stream, AnyBuffer q, AnyBuffer k, AnyBuffer weights,
                                  AnyBuffer k_scale, AnyBuffer starts, S32 ends,
                                  AnyBuffer page_table, Result<S32> indices, Result<F32> values,
                                  Result<S32> keys, Result<F32> scores, Result<F32> logits,
                                  Attr<bool, "relu"> relu, Attr<int64_t, "page_size"> page_size,
                                  Attr<int64_t, "block_size"> block_size,
                                  Attr<int64_t, "sink_blocks"> sink_blocks,
                                  Attr<int64_t, "local_blocks"> local_blocks) {
  constexpr const char* kOp = "indexer_block_topk_fwd";
  namespace limits = ::jax_dsa::limits::indexer;
  IndexerBlockTopkParams params = {};
  IndexerFwdParams& p = params.logits;
  const bool paged = present(page_table), per_head = !present(weights);
  const Dims dims = q.dimensions();
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "q", dims, {"B", "T", "G", "J", "C"}));
  DSA_FFI_RETURN_IF_ERROR(per_head ? check_one_of(kOp, "J without weights", dims[3], {1})
                                   : check_one_of(kOp, "G with weights", dims[2], {1}));
  const int64_t flat[] = {dims[0], dims[1], per_head ? dims[2] : dims[3], dims[4]};
  DSA_FFI_RETURN_IF_ERROR(read_products(kOp, q, Dims(flat, 4), k, k_scale, relu, &p, paged));
  DSA_FFI_RETURN_IF_ERROR(read_ends(kOp, ends, &p));
  DSA_FFI_RETURN_IF_ERROR(optional_data(kOp, "weights", weights, DataType::F32,
                                        {p.batch, p.queries, 1, p.heads}, &p.weights));
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "starts", starts, DataType::S32, {p.batch, p.queries}, &p.starts));
  if (paged) {
    DSA_FFI_RETURN_IF_ERROR(read_pages(kOp, page_table, k.dimensions()[0], page_size, &p));
  }
  const int64_t lists = per_head ? p.heads : 1;
  DSA_FFI_RETURN_IF_ERROR(
      check_range(kOp, "B T G", p.batch * p.queries * lists, 0, limits::kMaxLists));
  int64_t blocks;
  DSA_FFI_RETURN_IF_ERROR(read_blocks(kOp, p.keys, block_size, sink_blocks, local_blocks,
                                      limits::kMaxBlocks, &params, &blocks));
  if (per_head && paged) {
    if (present(starts)) {
      return invalid_argument(kOp, "'starts' is given, expected none with pages without weights");
    }
    if (blocks > 1) {
      DSA_FFI_RETURN_IF_ERROR(
          check_multiple(kOp, "block_size with pages", block_size, limits::kPageMultiple));
    }
  }
  if (!per_head) {
    DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "starts", starts.dimensions(), {"B", "T"}));
  }
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "indices", indices->dimensions(), {"B", "T", "G", "K"}));
  params.k = indices->dimensions()[3];
  const auto check_result = [&](const char* name, Dims dims) {
    return check_shape(kOp, name, dims, {p.batch, p.queries, lists, params.k});
  };
  DSA_FFI_RETURN_IF_ERROR(check_result("indices", indices->dimensions()));
  DSA_FFI_RETURN_IF_ERROR(check_result("logits", values->dimensions()));
  DSA_FFI_RETURN_IF_ERROR(check_result("keys", keys->dimensions()));
  const int64_t query_scores = std::max<int64_t>(lists * blocks, 1);
  const int64_t query_logits = std::max<int64_t>(p.keys, 1);
  DSA_FFI_RETURN_IF_ERROR(check_workspace(kOp, "scores", scores->size_bytes(), 8 * query_scores));
  params.capacity = static_cast<int64_t>(scores->element_count()) / (2 * query_scores);
  if (!per_head) {
    DSA_FFI_RETURN_IF_ERROR(check_workspace(kOp, "logits", logits->size_bytes(), 4 * query_logits));
    params.capacity =
        std::min(params.capacity, static_cast<int64_t>(logits->element_count()) / query_logits);
    p.out = logits->typed_data();
  }
  params.scores = reinterpret_cast<BlockScore*>(scores->typed_data());
  params.indices = indices->typed_data();
  params.values = values->typed_data();
  params.keys = keys->typed_data();
  return launch_status(kOp, launch_indexer_block_topk(params, stream));
}

// q [B, T, J, C], k [B, S, C], weights [B, T, J], k_scale [B, S]?, indices and grad [B, T, K]
// -> dq [B, T, J, C], dk [B, S, C] in float32, dweights [B, T, J], dk_scale [B, S]?, and the
//    workspace relu_mask [B, T, K rounded up to a multiple of 64, 2]: a bit for each slot and head,
//    set where the score is positive
ffi::Error indexer_topk_bwd(cudaStream_t stream, BF16 q, BF16 k, F32 weights, AnyBuffer k_scale,
                            S32 indices, F32 grad, Result<BF16> dq, Result<F32> dk,
                            Result<F32> dweights, Result<F32> dk_scale, Result<U32> relu_mask,
                            Attr<bool, "relu"> relu) {
  constexpr const char* kOp = "indexer_topk_bwd";
  Sizes sizes;
  DSA_FFI_RETURN_IF_ERROR(read_sizes(kOp, q.dimensions(), k.dimensions(), &sizes));
  const auto& [batch, queries, keys, heads, channels] = sizes;
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "weights", weights.dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(kOp, "indices", indices.dimensions(), {"B", "T", "K"}));
  const int64_t slots = indices.dimensions()[2];
  DSA_FFI_RETURN_IF_ERROR(check_range(kOp, "K", slots, 0, limits::indexer::kMaxSlots));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "indices", indices.dimensions(), {batch, queries, slots}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "grad", grad.dimensions(), {batch, queries, slots}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dq", dq->dimensions(), q.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dk", dk->dimensions(), k.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "dweights", dweights->dimensions(), weights.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_workspace(kOp, "relu_mask", relu_mask->size_bytes(),
                                          8 * indexer_bwd_relu_mask_words(batch * queries, slots)));
  IndexerBwdParams params = {
      .q = q.untyped_data(),
      .k = k.untyped_data(),
      .weights = weights.typed_data(),
      .indices = indices.typed_data(),
      .grad = grad.typed_data(),
      .dq = dq->untyped_data(),
      .dk = dk->typed_data(),
      .dweights = dweights->typed_data(),
      .relu_mask = reinterpret_cast<uint64_t*>(relu_mask->typed_data()),
      .batch = batch,
      .queries = queries,
      .keys = keys,
      .slots = static_cast<int>(slots),
      .heads = static_cast<int>(heads),
      .channels = static_cast<int>(channels),
      .relu = relu,
  };
  DSA_FFI_RETURN_IF_ERROR(
      optional_data(kOp, "k_scale", k_scale, DataType::F32, {batch, keys}, &params.k_scale));
  if (present(k_scale)) {
    DSA_FFI_RETURN_IF_ERROR(
        check_shape(kOp, "dk_scale", dk_scale->dimensions(), k_scale.dimensions(), {}));
    params.dk_scale = dk_scale->typed_data();
  }
  return launch_status(kOp, launch_indexer_bwd(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.indexer_candidates_fwd.v1", indexer_candidates_fwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.indexer_block_topk_fwd.v1", indexer_block_topk_fwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.indexer_logits_fwd.v1", indexer_logits_fwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.indexer_selected_fwd.v1", indexer_selected_fwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.indexer_topk_bwd.v1", indexer_topk_bwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.indexer_topk_fwd.v1", indexer_topk_fwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
