// Sparse MLA of a few queries over a cache: flat or paged, of bf16 keys or of FP8 records, with
// each query's slots dealt out to several blocks.
#pragma once

#include "sparse_mla/sparse_mla.h"

namespace jax_dsa {

inline constexpr int kSparseMlaMaxSplits = 64;

// As in the forward pass, but for
//   kv    flat: [batch, keys, groups, dim]. Paged: [pages * page_size, groups, dim], and `keys` is
//         page_slots * page_size. With `records` (dim 576) a row is a record in place of dim
//         values.
//   dim   of q and of a row's meaning
struct SparseMlaDecodeParams : SparseMlaFwdParams {
  int64_t batch_rows;  // from one request's rows to the next's: keys, or pages * page_size if each
                       // has a pool of its own; 0 where all share them
  bool records;
  const int32_t* page_table;  // [batch, page_slots]: the page of tokens r * page_size on; anything
                              // outside 0..pages-1 has none. Null: a flat cache
  int pages;
  int page_size;
  int page_slots;
  int splits;          // parts of every row of slots, 1..64
  float* partial;      // sparse_mla_decode_partial_count floats, aligned to 16; null if splits = 1
  float* partial_lse;  // sparse_mla_decode_lse_count floats; null if splits = 1
};

// What (query, group, 64 heads) there are.
inline int64_t sparse_mla_decode_items(int64_t batch, int64_t queries, int heads, int groups) {
  return batch * queries * groups * ((heads / groups + 63) / 64);
}
inline int64_t sparse_mla_decode_partial_count(int64_t items, int splits) {
  return splits > 1 ? items * splits * 64 * kMlaValueDim : 0;
}
inline int64_t sparse_mla_decode_lse_count(int64_t items, int splits) {
  return splits > 1 ? items * splits * 64 : 0;
}

// Into how many parts to split rows of `slots`, by a model of the time in quarters of what a tile
// of 64 keys takes: a block's start and end cost 6 of them, 8 with partial results; merging costs 5
// and as much as the parts' traffic. More than two rounds of partial results would leave the L2.
inline int sparse_mla_decode_splits(int64_t items, int slots, int num_sms) {
  const int tiles = (slots + 63) / 64;
  int best = 1;
  int64_t least = INT64_MAX;
  for (int n = 1; n <= tiles && n <= kSparseMlaMaxSplits; ++n) {
    const int64_t parts = items * n, rounds = (parts + num_sms - 1) / num_sms;
    const int64_t time = n == 1
                             ? rounds * (4 * tiles + 6)
                             : rounds * (4 * ((tiles + n - 1) / n) + 8) + 5 + 4 * parts / num_sms;
    if (n > 1 && parts > 2 * num_sms) break;
    if (time < least) {
      least = time;
      best = n;
    }
  }
  return best;
}

// The same from the slots alone, so that a request's result is the same, bit for bit, whatever
// others it is computed with and on whatever device: parts of 512 slots. One request would be
// fastest with parts of 64, 64 requests with whole rows.
inline int sparse_mla_decode_invariant_splits(int slots) {
  const int splits = (slots + 511) / 512;
  return splits < 1 ? 1 : splits < kSparseMlaMaxSplits ? splits : kSparseMlaMaxSplits;
}

cudaError_t launch_sparse_mla_decode(const SparseMlaDecodeParams& params, cudaStream_t stream);

}  // namespace jax_dsa
