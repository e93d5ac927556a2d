// Selects keys inside candidate blocks. For as many queries at a time as fit in the workspace, the
// kernels make the lists of blocks, compute the logits, select positions and replace them by keys.

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "indexer/candidates.cuh"
#include "topk/topk.h"

namespace jax_dsa {
namespace {

using namespace indexer;

template <IndexerDType kDType, int kChannels>
cudaError_t launch_logits(const IndexerFwdParams& p, const CandidateRows& x, cudaStream_t stream) {
  using Tr = DecodeTraits<kDType, kChannels, kIndexerMaxHeads, 1>;
  constexpr auto kType = kDType == IndexerDType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  CUtensorMap q;
  DSA_RETURN_IF_CUDA_ERROR(encode_tensor_map(
      &q, kType,
      tensor_box<4>(Tr::kElementBytes, p.q, {p.channels, p.heads, p.queries, p.batch},
                    {Tr::kRowBytes / Tr::kElementBytes, Tr::kColumns, 1, 1})));
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  // Segments of 64 tiles, or shorter ones if there would be fewer than 8 per SM.
  const int64_t tiles = x.rows * ceil_div(x.size, int64_t{kTile});
  const int64_t even = tiles / (8 * device.num_sms) / Tr::kWarpgroups * Tr::kWarpgroups;
  const int segment_tiles = static_cast<int>(std::clamp<int64_t>(even, Tr::kWarpgroups, 64));
  const int64_t units = x.rows * ceil_div(x.size, int64_t{segment_tiles} * kTile);
  return launch_persistent<CandidateShared<Tr>>(candidate_kernel<Tr>, units, Tr::kThreads, stream,
                                                p, x, segment_tiles, q);
}

template <IndexerDType kDType>
cudaError_t launch_channels(const IndexerFwdParams& p, const CandidateRows& x,
                            cudaStream_t stream) {
  switch (p.channels) {
    case 32:
      return launch_logits<kDType, 32>(p, x, stream);
    case 64:
      return launch_logits<kDType, 64>(p, x, stream);
    case 128:
      return launch_logits<kDType, 128>(p, x, stream);
  }
  return cudaErrorInvalidValue;
}

bool is_valid(const IndexerCandidatesParams& params) {
  const IndexerFwdParams& p = params.logits;
  const bool pages = p.page_table == nullptr ||
                     (p.page_size > 0 && p.page_size % kIndexerPageMultiple == 0 && p.pages > 0 &&
                      int64_t{p.pages} * p.page_size <= INT32_MAX - 4096 &&
                      p.keys == p.pages_per_request * p.page_size);
  return pages && p.keys <= INT32_MAX - 4096 && p.heads >= 1 && p.heads <= kIndexerMaxHeads &&
         params.block_size >= 1 &&
         ceil_div(p.keys, int64_t{params.block_size}) <= kIndexerMaxCandidateBlocks;
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
  x.lists = reinterpret_cast<int32_t*>(x.logits + chunk * x.size);
  x.counts = x.lists + chunk * x.list_size;
  const auto list_bytes =
      static_cast<int>(sizeof(ListShared) + ceil_div(blocks, int64_t{32}) * sizeof(uint32_t));
  for (; x.first_token < tokens; x.first_token += chunk) {
    x.rows = std::min(chunk, tokens - x.first_token);
    DSA_RETURN_IF_CUDA_ERROR(launch_blocks(list_kernel, x.rows, kListThreads, list_bytes, stream, p,
                                           x, params.candidates, params.slots));
    if (x.size > 0) {
      DSA_RETURN_IF_CUDA_ERROR(p.dtype == IndexerDType::kBF16
                                   ? launch_channels<IndexerDType::kBF16>(p, x, stream)
                                   : launch_channels<IndexerDType::kE4M3>(p, x, stream));
    }
    const TopkParams selection = {
        .logits = x.logits,
        .ends = x.counts,
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

}  // namespace jax_dsa
