// The losses that train the indexer. For every query they compute KL(p || softmax(I)), where I are
// the indexer's logits and p is the teacher, normalised to sum 1.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"

namespace jax_dsa {

// KL of rows of logits and teachers. The teachers need not be normalised. A slot is used if `valid`
// marks it, or with ranges if starts[row] <= slot < ends[row], or with neither if its logit is
// above -inf. A row counts if its teacher's sum is not 0. Other rows have a KL and a gradient of 0.
struct KlRowsParams {
  const float* logits;    // [rows, slots]
  const float* teacher;   // [rows, slots], >= 0
  const bool* valid;      // [rows, slots], or null
  const int32_t* starts;  // [rows], or null; null if `valid` is given
  const int32_t* ends;    // [rows]; null if `starts` is null
  float* kl;              // [rows]
  bool* counts;           // [rows]
  // [rows, slots]: row_weight * d kl / d logits; may be `logits`. With ranges, only the slots of
  // the range and up to three on each side, which get 0, are written.
  float* grad;
  float row_weight;  // weight of a row in the loss if all rows count
  int64_t rows;
  int64_t slots;
};

cudaError_t launch_kl_rows(const KlRowsParams& params, cudaStream_t stream);

// Sums of kl and counts over the `rows` rows of each batch entry.
struct SumKlParams {
  const float* kl;     // [batch, rows]
  const bool* counts;  // [batch, rows]
  float* total;        // [batch]
  int32_t* counted;    // [batch]
  int64_t batch;
  int64_t rows;
  bool add;  // whether to add to the previous contents of `total` and `counted`
};

cudaError_t launch_sum_kl(const SumKlParams& params, cudaStream_t stream);

// Multiplies the logits' gradient by the gradient of each row's KL: out = x * factor / row_weight.
struct ScaleRowsParams {
  const float* x;       // [rows, slots]
  const float* factor;  // [rows]
  float row_weight;     // factor that x already contains
  float* out;           // [rows, slots]; may be x
  int64_t rows;
  int64_t slots;
};

cudaError_t launch_scale_rows(const ScaleRowsParams& params, cudaStream_t stream);

// Probabilities of dense softmax attention, summed over all heads.
struct TeacherParams {
  const void* q;          // [batch, queries, heads, dim], bf16; 16-byte aligned
  const void* kv;         // [batch, keys, groups, dim], bf16; 16-byte aligned
  const int32_t* starts;  // [batch, queries]; a query sees the keys start <= s < end
  const int32_t* ends;    // [batch, queries]
  float* out;             // [batch, queries, keys]; written only where the query sees the key
  float2* pairs;          // workspace for dims up to 256: [batch, queries, heads]
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;   // a multiple of groups
  int groups;  // KV head groups
  int dim;     // 576 or 512 (latent form, many heads per group); 64, 128, 192 or 256
  float scale;
};

cudaError_t launch_teacher(const TeacherParams& params, cudaStream_t stream);

// Queries per segment. The dk of each segment is summed separately.
inline constexpr int kIndexGradsSegment = 128;
inline constexpr int kIndexGradsKeys = 128;  // keys per work tile
inline constexpr int kIndexGradsHeads = 64;  // the largest number of heads

// Backward pass of the indexer's logits at all keys that a query sees, with bf16 q and k. All sums
// have a fixed order.
struct IndexGradsParams {
  const void* q;          // [batch, queries, heads, channels], bf16; 16-byte aligned
  const void* k;          // [batch, keys, channels], bf16; 16-byte aligned
  const float* weights;   // [batch, queries, heads]
  const float* k_scale;   // [batch, keys], or null: 1
  const int32_t* starts;  // [batch, queries]; a query sees the keys start <= s < end
  const int32_t* ends;    // [batch, queries]
  const float* grad;      // [batch, queries, keys]: dL / dlogits, 16-byte aligned; read only
                          // where the query sees the key
  float* dq;              // [batch, queries, heads, channels]
  float* dk;              // [batch, keys, channels]
  float* dweights;        // [batch, queries, heads]
  float* dk_scale;        // [batch, keys]; null if k_scale is null
  float* partial_dk;      // workspace [segments, batch, keys, channels]: dk of each segment
  bool* partial_used;     // workspace [segments, batch, ceil(keys / kIndexGradsKeys)]: whether a
                          // segment has a dk for these keys
  int64_t batch;
  int64_t queries;
  int64_t keys;
  int heads;     // 1 .. kIndexGradsHeads
  int channels;  // 32, 64 or 128
  bool relu;
  // The queries may be a chunk of all queries. Except for the `first` chunk, dk holds the sum over
  // earlier chunks, without k_scale. After the `last` chunk, dk is complete.
  bool first, last;
};

cudaError_t launch_index_grads(const IndexGradsParams& params, cudaStream_t stream);

// The products among these kernels: dq and dweights of the queries that see a key, partial_dk and
// partial_used. There must be queries and keys.
cudaError_t launch_index_products(const IndexGradsParams& params, cudaStream_t stream);

// The warm-up loss with its gradients: the KL summed over the rows that count, the number of these
// rows, and the gradients of the sum. The workspace holds the logits and teachers of whole batch
// entries or of a chunk of one entry's queries at a time.
struct DenseLossParams {
  IndexGradsParams index;  // grad, partial_dk, partial_used, first and last are ignored
  TeacherParams teacher;   // only q, kv, heads, groups, dim and scale are read
  float* kl;               // [batch]
  int32_t* rows;           // [batch]
  void* workspace;         // 16-byte aligned
  int64_t capacity;        // bytes of the workspace, at least dense_loss_bytes of one query
};

// Returns the bytes of workspace that `queries` queries of each of `batch` entries need.
constexpr int64_t dense_loss_bytes(int64_t batch, int64_t queries, int64_t keys, int64_t channels,
                                   int64_t heads) {
  const int64_t segments = (queries + kIndexGradsSegment - 1) / kIndexGradsSegment * batch;
  const int64_t key_blocks = (keys + kIndexGradsKeys - 1) / kIndexGradsKeys;
  // Each of the seven arrays begins at a multiple of 256 bytes.
  return batch * queries * (2 * 4 * keys + 8 * heads + 4 + 1) +
         segments * (keys * channels * 4 + key_blocks) + 7 * 256;
}

cudaError_t launch_dense_loss(const DenseLossParams& params, cudaStream_t stream);

namespace hopper {
cudaError_t launch_teacher(const TeacherParams& params, cudaStream_t stream);
cudaError_t launch_index_products(const IndexGradsParams& params, cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_teacher(const TeacherParams& params, const Device& device, cudaStream_t stream);
cudaError_t launch_index_products(const IndexGradsParams& params, cudaStream_t stream);
}  // namespace portable

}  // namespace jax_dsa
