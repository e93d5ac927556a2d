// The logits of listed keys: of the candidates, between the kernels of the indexer inside candidate
// blocks, and of keys that the caller names.
#pragma once

#include "indexer/indexer.h"

namespace jax_dsa {

namespace indexer {

// The lists and logits of a chunk of queries, which are `rows` consecutive ones of all batch
// entries.
struct CandidateRows {
  const int32_t* counts;  // [rows]: number of candidate keys, or null for `size`
  const int32_t* lists;   // [rows, list_size]: the first key of each block; a key outside 0 .. keys
                          // - 1 has the logit -inf
  float* logits;          // [rows, size]
  int64_t first_token;    // index of the first query in [batch, queries]
  int64_t rows;
  int64_t size;  // the largest number of candidate keys
  int list_size, block_size;
};

}  // namespace indexer

// Computes the logits of candidate keys from their lists. `x.rows` and `x.size` are not 0.
cudaError_t launch_candidate_logits(const IndexerFwdParams& p, const indexer::CandidateRows& x,
                                    cudaStream_t stream);

namespace hopper {
cudaError_t launch_candidate_logits(const IndexerFwdParams& p, const indexer::CandidateRows& x,
                                    cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_candidate_logits(const IndexerFwdParams& p, const indexer::CandidateRows& x,
                                    const Device& device, cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
