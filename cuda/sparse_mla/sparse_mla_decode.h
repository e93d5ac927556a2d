// Sparse MLA of a few queries over one or two caches. Each is flat or paged and holds bf16 keys or
// FP8 records. The slots of each query are divided among several CTAs.
#pragma once

#include "sparse_mla/sparse_mla.h"

namespace jax_dsa {

inline constexpr int kSparseMlaMaxSplits = 64;

// A second cache, from which each query has a list of slots of its own. The fields mean what those
// of SparseMlaDecodeParams mean. Both caches have the same groups, and both have records or not.
struct SparseMlaExtraKeys {
  const void* kv;
  const int32_t* indices;  // [batch, queries, groups, slots]
  const int32_t* ends;
  const int32_t* topk_length;
  const int32_t* page_table;
  int64_t keys;
  int64_t batch_rows;
  int slots;  // 0: there is no second cache
  int pages;
  int page_size;
  int page_slots;
};

// As in the forward pass, with these differences:
//   kv   flat: [batch, keys, groups, dim]. Paged: [pages * page_size, groups, dim], and `keys` is
//        page_slots * page_size. With `records` a row is a record instead of dim values (dim 576),
//        or `page_size` rows are a page of page records (dim 512; paged, with an even number of
//        records per page).
//   dim  the width of q and of a key, whether or not keys are records
struct SparseMlaDecodeParams : SparseMlaFwdParams {
  int64_t batch_rows;  // rows from one request's first row to the next's: keys, or pages *
                       // page_size if each request has its own page pool; 0 if all requests share
                       // the rows
  bool records;
  bool batch_invariant;       // the same bits for keys and for records of the same values
  const int32_t* page_table;  // [batch, page_slots]: entry r is the page of tokens r * page_size
                              // and on; any value outside 0..pages-1 means no page. Null: a flat
                              // cache
  int pages;
  int page_size;
  int page_slots;
  int splits;            // KV splits of every row of slots, 1..64
  float* partial;        // sparse_mla_decode_partial_count floats, aligned to 16 bytes; null if
                         // splits = 1
  float2* partial_rows;  // sparse_mla_decode_row_count pairs of a row's maximum and sum; null if
                         // splits = 1
  SparseMlaExtraKeys extra;
};

// Returns the number of slots of a query in both lists. The first list is filled up to whole tiles
// of 64 slots, so that a tile has keys of one cache.
inline int64_t sparse_mla_decode_slots(int slots, int extra_slots) {
  return extra_slots > 0 ? (int64_t{slots} + 63) / 64 * 64 + extra_slots : slots;
}

// Returns the number of (query, KV head group, 64 heads).
inline int64_t sparse_mla_decode_work_tiles(int64_t batch, int64_t queries, int heads, int groups) {
  return batch * queries * groups * ((heads / groups + 63) / 64);
}
inline int64_t sparse_mla_decode_partial_count(int64_t work_tiles, int splits) {
  return splits > 1 ? work_tiles * splits * 64 * kMlaValueDim : 0;
}
inline int64_t sparse_mla_decode_row_count(int64_t work_tiles, int splits) {
  return splits > 1 ? work_tiles * splits * 64 : 0;
}

// Returns the number of splits for rows of `slots` that minimizes a model of the time. The unit is
// a quarter of the time of one tile of 64 keys. A CTA's start and end cost 6 units, or 8 with
// partial results. Combining costs 16 units, and 12 for each round of CTAs because of the traffic
// of the splits. On one H200 the choice is within 7 % of the best number of splits in 15 cases of 1
// to 64 requests. More than two rounds of partial results would not stay in the L2.
inline int sparse_mla_decode_splits(int64_t work_tiles, int slots, int num_sms) {
  const int tiles = (slots + 63) / 64;
  int best = 1;
  int64_t least = INT64_MAX;
  for (int splits = 1; splits <= tiles && splits <= kSparseMlaMaxSplits; ++splits) {
    const int64_t ctas = work_tiles * splits, rounds = (ctas + num_sms - 1) / num_sms;
    const int64_t time =
        splits == 1 ? rounds * (4 * tiles + 6)
                    : rounds * (4 * ((tiles + splits - 1) / splits) + 8) + 16 + 12 * ctas / num_sms;
    if (splits > 1 && ctas > 2 * num_sms) break;
    if (time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

// Returns a number of splits that depends on the slots alone: one split per 512 slots. A request's
// result is then bit-identical on every device and in every batch. For speed alone, splits of 64
// slots would be best for one request and whole rows for 64 requests.
inline int sparse_mla_decode_invariant_splits(int slots) {
  const int splits = (slots + 511) / 512;
  return splits < 1 ? 1 : splits < kSparseMlaMaxSplits ? splits : kSparseMlaMaxSplits;
}

cudaError_t launch_sparse_mla_decode(const SparseMlaDecodeParams& params, cudaStream_t stream);

namespace hopper {
cudaError_t launch_sparse_mla_decode(const SparseMlaDecodeParams& params, cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_sparse_mla_decode(const SparseMlaDecodeParams& params, const Device& device,
                                     cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
