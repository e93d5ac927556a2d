// Block maxima of the indexer for heads that select for themselves.
#pragma once

#include "indexer/indexer.h"

namespace jax_dsa {

namespace indexer {

struct BlockMaxParams {
  IndexerFwdParams in;
  BlockScore* scores;  // [batch, queries, heads, blocks]; blocks that a query lacks are not written
  int64_t blocks;
  int unit_keys;  // keys per unit: one block, or a key tile of several blocks
};

}  // namespace indexer

// Finds the maxima of blocks of `unit_keys` keys. There are keys.
cudaError_t launch_block_max(const indexer::BlockMaxParams& params, cudaStream_t stream);

namespace hopper {
cudaError_t launch_block_max(const indexer::BlockMaxParams& params, cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_block_max(const indexer::BlockMaxParams& params, const Device& device,
                             cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
