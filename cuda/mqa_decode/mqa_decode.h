// Attention of a few queries per request to all keys that they see, in an array or in a flat or
// paged cache. It covers multi-query, grouped-query and MLA decoding; the values of MLA are the
// first elements of the keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/limits.h"

namespace jax_dsa {

// What a CTA group processes: consecutive work tiles (cuda/mqa_decode/plan.cuh), of which the first
// and the last may be parts. It is the same whatever the lengths are, so a plan that was made for
// other lengths gives right results.
struct MqaDecodeRange {
  int first, last;     // the work tiles; last = first - 1 if there are none
  int from, to;        // the first key tile of the first work tile, and the end in the last one;
                       // INT_MAX: to the last key
  int splits_of_last;  // if it begins the last work tile and does not finish it: the number of that
                       // work tile's KV splits; otherwise 0
  int work_tiles, cta_groups;  // of the call that the plan is for
  int mark;                    // kPlanMark
};
inline constexpr int kMqaDecodePlanRanges = 2 * kMaxSms;  // ranges of a plan

// Query t of request b sees the existing keys with starts[b, t] <= j < ends[b, t].
struct MqaDecodeParams {
  const void* q;          // [batch, queries, heads, dim], bf16
  const void* k;          // flat: [batch, keys, groups, dim], bf16. Paged: [pages * page_size,
                          // groups, dim], and `keys` is page_slots * page_size
  const void* v;          // like k, with value_dim; or null: values are the first 512 elements
                          // of a key
  bool records;           // rows of k are FP8 records; requires dim 576 and no v
  const int32_t* starts;  // [batch, queries]
  const int32_t* ends;    // [batch, queries]
  const float* sinks;     // [batch, heads], or [heads] with sinks_stride = 0, or null
  const MqaDecodeRange* plan = nullptr;  // [kMqaDecodePlanRanges] or null. Ignored if it was made
                                         // for other sizes
  const int32_t* page_table;  // [batch, page_slots]: entry r is the page of tokens r * page_size
                              // and on; any value outside 0..pages-1 means no page. Null: flat
  void* out;                  // [batch, queries, heads, value_dim], bf16; float32 if `out_float`
  float* max_logit;      // [batch, queries, heads]: the largest score if `exact_max`, otherwise
                         // a number at most log(2^8) smaller; -inf for a row without a key
  float* log_sum;        // [batch, queries, heads]: log(sum(exp(score - max_logit))) without the
                         // sink; 0 for a row without a key
  float* partial;        // [partial results, rows, value_dim], see `mqa_decode_workspace`
  float2* partial_rows;  // [partial results, rows]: maximum and sum
  int2* split_tiles;     // [CTA groups]: the number of the group's last work tile, and if it begins
                         // that and does not finish it, its number of splits; otherwise 0
  int64_t batch;
  int64_t queries;
  int64_t keys;        // per request
  int64_t batch_rows;  // rows from one request's first row to the next's; 0 if all requests share
                       // the rows
  int heads;           // a multiple of groups
  int groups;
  int dim;        // 576 or 512 without v; 64, 128 or 256 with v
  int value_dim;  // 512 without v, dim with v
  int pages;
  int page_size;
  int page_slots;
  int sinks_stride = 0;
  float scale;  // > 0
  bool out_float = false;
  bool exact_max = false;
};

// Returns the number of rows (queries times heads of a KV head group) that are multiplied at a
// time.
inline int mqa_decode_rows(int64_t queries, int heads, int groups, int dim, bool records) {
  const int64_t rows = groups > 0 ? queries * (heads / groups) : 0;
  return rows <= 16 ? 16 : (rows <= 32 && !records) || dim < 512 ? 32 : 64;
}

// Returns how many CTAs of a kernel for Hopper share an SM, by the result of `mqa_decode_rows`.
inline int mqa_decode_ctas_per_sm(int rows) { return rows == 64 ? 1 : 2; }

// The size of the workspace for partial results, sufficient for every device: rows of `partial` and
// `partial_rows`, and entries of `split_tiles`.
struct MqaDecodeWorkspace {
  int64_t rows, split_tiles;
};
inline MqaDecodeWorkspace mqa_decode_workspace(int rows) {
  const int ctas = kMaxSms * mqa_decode_ctas_per_sm(rows);
  // A portable kernel may multiply 32 rows where this one multiplies 64, in twice as many CTAs.
  return {int64_t{2} * ctas * rows, kMqaDecodePlanRanges};
}

cudaError_t launch_mqa_decode(const MqaDecodeParams& params, cudaStream_t stream);

// Makes a plan for calls with the batch, queries, heads, groups, dim and records of these
// parameters, from `starts` and `ends`. The other parameters are not read, except `keys`: the plan
// is made as if requests had no more. Only the kernels for Hopper have plans.
cudaError_t launch_mqa_decode_plan(const MqaDecodeParams& params, MqaDecodeRange* plan,
                                   cudaStream_t stream);

}  // namespace jax_dsa
