// Launcher of the warm-up loss. It runs the loss's kernels one after the other, over as many
// queries at a time as the workspace can hold.

#include <algorithm>

#include "common/device.h"
#include "common/error.h"
#include "common/types.h"
#include "indexer/indexer.h"
#include "losses/losses.h"

namespace jax_dsa {
namespace {

// Allocates an array of `count` elements from the workspace at `at`.
template <typename T>
T* allocate(char*& at, int64_t count) {
  T* const x = reinterpret_cast<T*>(at);
  at += ceil_div(count * int64_t{sizeof(T)}, int64_t{256}) * 256;
  return x;
}

// Launches the kernels for the queries query .. query + count - 1 of the batch entries
// batch .. batch + entries - 1. With several entries, these must be all queries.
cudaError_t launch_chunk(const DenseLossParams& all, int64_t batch, int64_t entries, int64_t query,
                         int64_t count, cudaStream_t stream) {
  const int64_t tokens = entries * count, first_token = batch * all.index.queries + query;
  IndexGradsParams index = all.index;
  const int64_t keys = index.keys, rows = batch * keys;
  const int64_t segments = ceil_div(count, int64_t{kIndexGradsSegment}) * entries;

  char* at = static_cast<char*>(all.workspace);
  float* const logits = allocate<float>(at, tokens * keys);
  float* const probabilities = allocate<float>(at, tokens * keys);
  index.partial_dk = allocate<float>(at, segments * keys * index.channels);
  index.partial_used = allocate<bool>(at, segments * ceil_div(keys, int64_t{kIndexGradsKeys}));
  float2* const pairs = allocate<float2>(at, tokens * all.teacher.heads);
  float* const kl = allocate<float>(at, tokens);
  bool* const counts = allocate<bool>(at, tokens);
  if (at - static_cast<char*>(all.workspace) > all.capacity) return cudaErrorInvalidValue;

  const int64_t values = index.heads * index.channels;
  index.q = static_cast<const char*>(index.q) + first_token * values * 2;
  index.k = static_cast<const char*>(index.k) + rows * index.channels * 2;
  index.weights += first_token * index.heads;
  index.starts += first_token, index.ends += first_token;
  index.grad = logits;
  index.dq += first_token * values, index.dweights += first_token * index.heads;
  index.dk += rows * index.channels;
  if (index.k_scale != nullptr) index.k_scale += rows, index.dk_scale += rows;
  index.batch = entries, index.queries = count;
  index.first = query == 0, index.last = query + count == all.index.queries;

  TeacherParams teacher = all.teacher;
  teacher.q = static_cast<const char*>(teacher.q) + first_token * teacher.heads * teacher.dim * 2;
  teacher.kv = static_cast<const char*>(teacher.kv) + rows * teacher.groups * teacher.dim * 2;
  teacher.starts = index.starts, teacher.ends = index.ends, teacher.out = probabilities;
  teacher.pairs = pairs;
  teacher.batch = entries, teacher.queries = count, teacher.keys = keys;

  IndexerFwdParams scores = {};
  scores.q = index.q, scores.k = index.k, scores.weights = index.weights;
  scores.k_scale = index.k_scale, scores.starts = index.starts, scores.ends = index.ends;
  scores.out = logits, scores.batch = entries, scores.queries = count, scores.keys = keys;
  scores.heads = index.heads, scores.channels = index.channels;
  scores.dtype = IndexerDType::kBF16, scores.relu = index.relu;

  const KlRowsParams kl_rows = {.logits = logits,
                                .teacher = probabilities,
                                .starts = index.starts,
                                .ends = index.ends,
                                .kl = kl,
                                .counts = counts,
                                .grad = logits,
                                .row_weight = 1.f,
                                .rows = tokens,
                                .slots = keys};
  const SumKlParams sums = {.kl = kl,
                            .counts = counts,
                            .total = all.kl + batch,
                            .counted = all.rows + batch,
                            .batch = entries,
                            .rows = count,
                            .add = query > 0};
  DSA_RETURN_IF_CUDA_ERROR(launch_teacher(teacher, stream));
  DSA_RETURN_IF_CUDA_ERROR(launch_indexer_fwd(scores, stream));
  DSA_RETURN_IF_CUDA_ERROR(launch_kl_rows(kl_rows, stream));
  DSA_RETURN_IF_CUDA_ERROR(launch_sum_kl(sums, stream));
  return launch_index_grads(index, stream);
}

}  // namespace

cudaError_t launch_dense_loss(const DenseLossParams& p, cudaStream_t stream) {
  const int64_t batch = p.index.batch, queries = p.index.queries, keys = p.index.keys;
  const auto fits = [&](int64_t entries, int64_t count) {
    return dense_loss_bytes(entries, count, keys, p.index.channels, p.teacher.heads) <= p.capacity;
  };
  if (batch == 0) return cudaSuccess;
  if (queries == 0) return launch_chunk(p, 0, batch, 0, 0, stream);
  if (!fits(1, 1)) return cudaErrorInvalidValue;
  // Process whole batch entries if one fits, otherwise chunks of one entry's queries. The size of a
  // chunk is a multiple of num_sms if possible, so that no SM is idle in the teacher's kernel.
  int64_t entries = 1, count = queries;
  if (fits(1, queries)) {
    while (entries < batch && fits(entries + 1, queries)) ++entries;
  } else {
    Device device;
    DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
    int64_t most = 1;
    for (int64_t step = int64_t{1} << 30; step > 0; step /= 2) {
      if (fits(1, most + step)) most += step;
    }
    const int64_t num_sms = device.num_sms;
    count = most < num_sms ? most : most / num_sms * num_sms;
  }
  for (int64_t entry = 0; entry < batch; entry += entries) {
    for (int64_t query = 0; query < queries; query += count) {
      const cudaError_t e = launch_chunk(p, entry, std::min(entries, batch - entry), query,
                                         std::min(count, queries - query), stream);
      if (e != cudaSuccess) return e;
    }
  }
  return cudaSuccess;
}

}  // namespace jax_dsa
