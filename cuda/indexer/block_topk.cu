// Selects blocks of keys. A kernel finds the scores of the blocks and another one selects from
// them, alternately, each time over as many queries as fit in the workspace.

#include <algorithm>

#include "common/device.h"
#include "common/error.h"
#include "common/launch.cuh"
#include "common/tile.cuh"
#include "indexer/block_max.h"
#include "indexer/block_select.cuh"
#include "indexer/chunks.h"
#include "indexer/indexer.h"

namespace jax_dsa {

namespace indexer {

namespace {

template <int kWarps, int kVec, int kLists>
cudaError_t launch_select(const BlockSelectParams& p, cudaStream_t stream) {
  const int64_t ctas = ceil_div(p.queries * p.lists, int64_t{kLists});
  return launch_blocks(block_select_kernel<kWarps, kVec, kLists>, ctas, 32 * kWarps * kLists,
                       sizeof(typename ThreadGroup<kWarps>::Shared), stream, p);
}

cudaError_t select_blocks(const BlockSelectParams& p, cudaStream_t stream) {
  if (p.blocks <= 64) return launch_select<1, 2, 8>(p, stream);
  if (p.blocks <= 256) return launch_select<1, 8, 8>(p, stream);
  if (p.blocks <= 1024) return launch_select<1, 32, 8>(p, stream);
  return launch_select<16, 32, 1>(p, stream);
}

// Returns whether each key tile of the block-maximum kernel lies in the request's pages as it
// expects: pages hold whole tiles of 64 keys, which begin at the first key of the request.
bool rows_supported(const IndexerFwdParams& p, int64_t block_size, int64_t blocks) {
  if (p.page_table == nullptr) return true;
  return p.starts == nullptr && (blocks <= 1 || block_size % kTile == 0) && p.pages > 0 &&
         p.page_size > 0 && p.page_size % kIndexerPageMultiple == 0 &&
         int64_t{p.pages} * p.page_size <= INT32_MAX - 4096 &&
         p.keys == p.pages_per_request * p.page_size;
}

// Finds the scores of the blocks of heads that select for themselves.
cudaError_t score_rows(const IndexerFwdParams& p, const BlockSelectParams& s, BlockScore* scores,
                       cudaStream_t stream) {
  const BlockMaxParams max = {
      .in = p,
      .scores = scores,
      .blocks = s.blocks,
      .unit_keys = static_cast<int>(s.block_size),
  };
  return launch_block_max(max, stream);
}

// Finds the scores of blocks from the logits of their keys.
cudaError_t score_logits(const float* logits, const BlockSelectParams& s, BlockScore* scores,
                         cudaStream_t stream) {
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const int64_t ctas =
      std::min(ceil_div(s.queries * s.blocks, int64_t{8}), int64_t{device.num_sms} * 8);
  return launch_blocks(block_scores_kernel<256>, ctas, 256, 0, stream, s, logits, scores);
}

// Finds the scores of the blocks of heads that select together, through their logits.
cudaError_t score_heads(const IndexerFwdParams& p, const BlockSelectParams& s, BlockScore* scores,
                        cudaStream_t stream) {
  DSA_RETURN_IF_CUDA_ERROR(launch_indexer_fwd(p, stream));
  return score_logits(p.out, s, scores, stream);
}

// Returns whether there can be blocks of this size.
bool blocks_supported(int64_t keys, int64_t block_size, int64_t sink_blocks, int64_t local_blocks) {
  return keys <= INT32_MAX - 4096 && block_size >= 1 && block_size <= std::max<int64_t>(keys, 1) &&
         indexer_blocks(keys, block_size) <= kIndexerMaxBlocks && sink_blocks >= 0 &&
         local_blocks >= 0;
}

}  // namespace
}  // namespace indexer

cudaError_t launch_indexer_block_topk(const IndexerBlockTopkParams& p, cudaStream_t stream) {
  const IndexerFwdParams& all = p.logits;
  const bool per_head = all.weights == nullptr;
  const int64_t lists = per_head ? all.heads : 1;
  if (all.batch == 0 || all.queries == 0 || p.k == 0) return cudaSuccess;
  if (all.heads < 1 || all.batch * all.queries > (INT32_MAX - 4096) / lists ||
      !indexer::blocks_supported(all.keys, p.block_size, p.sink_blocks, p.local_blocks)) {
    return cudaErrorInvalidValue;
  }
  const int64_t blocks = indexer_blocks(all.keys, p.block_size);
  if (per_head ? !indexer::rows_supported(all, p.block_size, blocks) : all.starts == nullptr) {
    return cudaErrorInvalidValue;
  }
  // A chunk is a multiple of the work tile of the block-maximum kernel, or of the indexer's at 64
  // heads.
  const int64_t step = per_head ? std::max<int64_t>(256 / all.heads, 1) : 8;
  const auto select = [&](IndexerFwdParams chunk, int64_t token) {
    chunk.whole_rows = false;  // Only logits within the ranges are read.
    const int64_t first = token * lists * p.k;
    const indexer::BlockSelectParams selection = {
        .scores = p.scores,
        .starts = chunk.starts,
        .ends = chunk.ends,
        .indices = p.indices + first,
        .values = p.values + first,
        .keys = p.keys + first,
        .queries = chunk.batch * chunk.queries,
        .lists = lists,
        .blocks = blocks,
        .k = p.k,
        .block_size = p.block_size,
        .sink_blocks = p.sink_blocks,
        .local_blocks = p.local_blocks,
        .size = static_cast<int>(all.keys),
    };
    if (all.keys > 0) {
      DSA_RETURN_IF_CUDA_ERROR(per_head ? indexer::score_rows(chunk, selection, p.scores, stream)
                                        : indexer::score_heads(chunk, selection, p.scores, stream));
    }
    return indexer::select_blocks(selection, stream);
  };
  return indexer::for_each_chunk(all, p.capacity, step, step, select);
}

cudaError_t launch_block_topk(const BlockTopkParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.k == 0) return cudaSuccess;
  if (p.capacity < 1 || p.rows > INT32_MAX - 4096 ||
      !indexer::blocks_supported(p.keys, p.block_size, p.sink_blocks, p.local_blocks)) {
    return cudaErrorInvalidValue;
  }
  for (int64_t first = 0; first < p.rows; first += p.capacity) {
    const indexer::BlockSelectParams selection = {
        .scores = p.scores,
        .starts = p.starts ? p.starts + first : nullptr,
        .ends = p.ends + first,
        .indices = p.indices + first * p.k,
        .queries = std::min(p.capacity, p.rows - first),
        .lists = 1,
        .blocks = indexer_blocks(p.keys, p.block_size),
        .k = p.k,
        .block_size = p.block_size,
        .sink_blocks = p.sink_blocks,
        .local_blocks = p.local_blocks,
        .size = static_cast<int>(p.keys),
    };
    if (p.keys > 0) {
      const float* const logits = p.logits + first * p.keys;
      DSA_RETURN_IF_CUDA_ERROR(indexer::score_logits(logits, selection, p.scores, stream));
    }
    DSA_RETURN_IF_CUDA_ERROR(indexer::select_blocks(selection, stream));
  }
  return cudaSuccess;
}

}  // namespace jax_dsa
