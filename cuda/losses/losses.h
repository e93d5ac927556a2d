// The indexer's losses: KL(p || softmax(I)) of every query, p its normalised teacher.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

// Rows of logits and of teachers, which need not be normalised. A slot takes part if it is valid
// (without `valid`: if its logit is above -inf), or with ranges if starts[row] <= slot < ends[row].
// A row counts if its teacher's sum is not 0; the others have a KL and a gradient of 0.
struct KlRowsParams {
  const float* logits;    // [rows, slots]
  const float* teacher;   // [rows, slots], >= 0
  const bool* valid;      // [rows, slots], or null
  const int32_t* starts;  // [rows], or null; null if `valid` is not
  const int32_t* ends;    // [rows]; null if `starts` is
  float* kl;              // [rows]
  bool* counts;           // [rows]
  float* grad;            // [rows, slots]: share * d kl / d logits; may be `logits`. With ranges no
                          // more than their slots and up to three on each side, which get 0, are
                          // written
  float share;            // of a row in the loss, if all of them count
  int64_t rows;
  int64_t slots;
};

cudaError_t launch_kl_rows(const KlRowsParams& params, cudaStream_t stream);

// Sums of the rows' KL and counts, `rows` of each batch entry.
struct SumKlParams {
  const float* kl;     // [batch, rows]
  const bool* counts;  // [batch, rows]
  float* total;        // [batch]
  int32_t* counted;    // [batch]
  int64_t batch;
  int64_t rows;
  bool add;  // to what is there
};

cudaError_t launch_sum_kl(const SumKlParams& params, cudaStream_t stream);

// Row by row what the loss's gradient makes of the logits': x * factor / share.
struct ScaleRowsParams {
  const float* x;       // [rows, slots]
  const float* factor;  // [rows]
  float share;          // what x has been multiplied with
  float* out;           // [rows, slots]; may be x
  int64_t rows;
  int64_t slots;
};

cudaError_t launch_scale_rows(const ScaleRowsParams& params, cudaStream_t stream);

// Dense softmax attention's probabilities, summed over all heads.
struct TeacherParams {
  const void* q;          // [batch, queries, heads, dim], bf16; 16-byte aligned
  const void* kv;         // [batch, keys, groups, dim], bf16; 16-byte aligned
  const int32_t* starts;  // [batch, queries]; a query sees the keys start <= s < end
  const int32_t* ends;    // [batch, queries]
  float* out;             // [batch, queries, keys]; written where a key is seen
  float* offsets;         // workspace [batch, queries, heads] for dims up to 256
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;   // a multiple of groups
  int groups;  // of keys
  int dim;     // 576 or 512, whose groups may have many heads; 64, 128, 192 or 256
  float scale;
};

cudaError_t launch_teacher(const TeacherParams& params, cudaStream_t stream);

// The gradients of the indexer's logits at all keys that a query sees, of bf16 q and k, in a fixed
// order of sums.
inline constexpr int kIndexGradsSegment = 128;  // queries whose part of dk is summed apart
inline constexpr int kIndexGradsKeys = 128;     // keys of a block

struct IndexGradsParams {
  const void* q;          // [batch, queries, heads, channels], bf16; 16-byte aligned
  const void* k;          // [batch, keys, channels], bf16; 16-byte aligned
  const float* weights;   // [batch, queries, heads]
  const float* k_scale;   // [batch, keys], or null: 1
  const int32_t* starts;  // [batch, queries]; a query sees the keys start <= s < end
  const int32_t* ends;    // [batch, queries]
  const float* grad;      // [batch, queries, keys]: dL / dlogits, 16-byte aligned; not used where
                          // no key is seen
  float* dq;              // [batch, queries, heads, channels]
  float* dk;              // [batch, keys, channels]
  float* dweights;        // [batch, queries, heads]
  float* dk_scale;        // [batch, keys]; null if k_scale is
  float* parts;           // workspace [segments, batch, keys, channels], segments of
                          // kIndexGradsSegment queries
  bool* used;             // workspace [segments, batch, blocks of keys]: which parts there are
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;     // 1 .. 64
  int channels;  // 32, 64 or 128
  bool relu;
  // The queries may be some of all: dk is that of the earlier ones, without k_scale, unless these
  // are the `first`, and is complete after the `last`.
  bool first, last;
};

cudaError_t launch_index_grads(const IndexGradsParams& params, cudaStream_t stream);

// The warm-up loss with its gradients: the KL summed over the rows that count, how many do, and the
// gradients of that sum. Logits and teachers of whole batch entries or of a part of one entry's
// queries are in memory at a time.
struct DenseLossParams {
  IndexGradsParams index;  // without grad, parts, used, first and last
  TeacherParams teacher;   // without workspace; the sizes and ranges are those of `index`
  float* kl;               // [batch]
  int32_t* rows;           // [batch]
  void* workspace;         // 16-byte aligned
  int64_t capacity;        // of the workspace: dense_loss_bytes of one query or more
};

// What so many queries of each of `batch` entries need.
constexpr int64_t dense_loss_bytes(int64_t batch, int64_t queries, int64_t keys, int64_t channels,
                                   int64_t heads) {
  const int64_t parts = (queries + kIndexGradsSegment - 1) / kIndexGradsSegment * batch;
  const int64_t key_blocks = (keys + kIndexGradsKeys - 1) / kIndexGradsKeys;
  // Seven arrays begin at multiples of 256 bytes.
  return batch * queries * (2 * 4 * keys + 4 * heads + 4 + 1) +
         parts * (keys * channels * 4 + key_blocks) + 7 * 256;
}

cudaError_t launch_dense_loss(const DenseLossParams& params, cudaStream_t stream);

}  // namespace jax_dsa
