// Attention of a few queries of each request over all keys that they see, in an array or in a flat
// or paged cache: multi-query and grouped-query decoding, and MLA's, whose values are a part of the
// keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/limits.h"

namespace jax_dsa {

// What is to be tuned, with what is best.
struct MqaDecodeTuning {
  int merge_cost = 6;  // of cutting a few requests, in tiles: below this, none is cut
  int least = 3;       // tiles of a share, if there are enough for one
};

// Query t of request b sees the keys starts[b, t] <= j < ends[b, t], of those that there are.
struct MqaDecodeParams {
  const void* q;              // [batch, queries, heads, dim], bf16
  const void* k;              // flat: [batch, keys, groups, dim], bf16. Paged: [pages * page_size,
                              // groups, dim]; `keys` is then page_slots * page_size
  const void* v;              // the same with value_dim, or null: the first 512 of a key
  bool records;               // without v, dim 576: rows of k are FP8 records in place of values
  const int32_t* starts;      // [batch, queries]
  const int32_t* ends;        // [batch, queries]
  const float* sinks;         // [batch, heads], or [heads] with sinks_stride = 0, or null
  const int32_t* page_table;  // [batch, page_slots]: the page of tokens r * page_size on; anything
                              // outside 0..pages-1 has none. Null: flat
  void* out;                  // [batch, queries, heads, value_dim], bf16; f32 with `top`
  float* lse;                 // [batch, queries, heads]; natural logarithm, without the sink
  float* top;                 // [batch, queries, heads], or null: the largest score
  float* partial;             // [slots, rows, value_dim]; see `mqa_decode_workspace`
  float2* partial_rows;       // [slots, rows]
  int2* cuts;                 // [teams]
  int64_t batch;
  int64_t queries;
  int64_t keys;        // of a request
  int64_t batch_rows;  // from one request's rows to the next's; 0 where all share them
  int heads;           // a multiple of groups
  int groups;
  int dim;        // without v: 576 or 512. With v: 64, 128 or 256
  int value_dim;  // 512, or dim
  int pages;
  int page_size;
  int page_slots;
  int sinks_stride;
  float scale;  // > 0
  MqaDecodeTuning tuning;
};

// Rows, queries times heads, of a group that are multiplied at a time.
inline int mqa_decode_rows(int64_t queries, int heads, int groups, int dim, bool records) {
  const int64_t rows = groups > 0 ? queries * (heads / groups) : 0;
  return rows <= 16 ? 16 : (rows <= 32 && !records) || dim < 512 ? 32 : 64;
}

// What results of parts of requests take, on any device: rows of `partial` and `partial_rows`, and
// entries of `cuts`.
struct MqaDecodeWorkspace {
  int64_t rows, cuts;
};
inline MqaDecodeWorkspace mqa_decode_workspace(int rows) {
  const int blocks = kMaxSms * (rows == 64 ? 1 : 2);
  return {int64_t{2} * blocks * rows, blocks};
}

cudaError_t launch_mqa_decode(const MqaDecodeParams& params, cudaStream_t stream);

}  // namespace jax_dsa
