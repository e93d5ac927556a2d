// Selects keys inside candidate blocks. For as many queries at a time as fit in the workspace, the
// kernels make the lists of blocks, compute the logits, select positions and replace them by keys.
// The kernel in the middle also computes the logits of keys that the caller names.

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "indexer/candidate_lists.cuh"
#include "topk/topk.h"

namespace jax_dsa {
namespace {

using namespace indexer;

bool is_valid(const IndexerCandidatesParams& params) {
  return jax_dsa::is_valid(params.logits) && params.block_size >= 1 &&
         ceil_div(params.logits.keys, int64_t{params.block_size}) <= kIndexerMaxCandidateBlocks;
}

}  // namespace

cudaError_t launch_indexer_candidates(const IndexerCandidatesParams& params, cudaStream_t stream) {
  const IndexerFwdParams& p = params.logits;
  if (!is_valid(params)) return cudaErrorInvalidValue;
  const int64_t tokens = p.batch * p.queries;
  const int64_t blocks = ceil_div(p.keys, int64_t{params.block_size});
  const int64_t fit =
      params.capacity / indexer_candidates_row_words(p.keys, params.slots, params.block_size);
  if (fit < 1) return cudaErrorInvalidValue;
  if (tokens == 0 || params.k == 0) return cudaSuccess;
  // Divide the queries into chunks of about equal size.
  const int64_t chunk = ceil_div(tokens, ceil_div(tokens, fit));
  CandidateRows x = {};
  x.size = indexer_candidate_keys(p.keys, params.slots, params.block_size);
  x.list_size = static_cast<int>(std::min(params.slots, blocks));
  x.block_size = params.block_size;
  x.logits = params.workspace;
  auto* const lists = reinterpret_cast<int32_t*>(x.logits + chunk * x.size);
  auto* const counts = lists + chunk * x.list_size;
  x.lists = lists, x.counts = counts;
  const auto list_bytes =
      static_cast<int>(sizeof(ListShared) + ceil_div(blocks, int64_t{32}) * sizeof(uint32_t));
  for (; x.first_token < tokens; x.first_token += chunk) {
    x.rows = std::min(chunk, tokens - x.first_token);
    DSA_RETURN_IF_CUDA_ERROR(launch_blocks(list_kernel, x.rows, kListThreads, list_bytes, stream, p,
                                           x, params.candidates, params.slots, lists, counts));
    if (x.size > 0) {
      DSA_RETURN_IF_CUDA_ERROR(launch_candidate_logits(p, x, stream));
    }
    const TopkParams selection = {
        .logits = x.logits,
        .ends = counts,
        .indices = params.indices + x.first_token * params.k,
        .values = params.values + x.first_token * params.k,
        .rows = x.rows,
        .size = x.size,
        .k = params.k,
    };
    DSA_RETURN_IF_CUDA_ERROR(launch_topk(selection, stream));
    DSA_RETURN_IF_CUDA_ERROR(
        launch_blocks(key_kernel, x.rows, kListThreads, 0, stream, x, selection.indices, params.k));
  }
  return cudaSuccess;
}

cudaError_t launch_indexer_selected(const IndexerSelectedParams& params, cudaStream_t stream) {
  const IndexerFwdParams& p = params.logits;
  if (!jax_dsa::is_valid(p) || params.slots > INT32_MAX - 4096) return cudaErrorInvalidValue;
  const CandidateRows x = {
      .lists = params.indices,
      .logits = p.out,
      .rows = p.batch * p.queries,
      .size = params.slots,
      .list_size = static_cast<int>(params.slots),
      .block_size = 1,
  };
  return x.rows == 0 || x.size == 0 ? cudaSuccess : launch_candidate_logits(p, x, stream);
}

}  // namespace jax_dsa
