// The forward's passes: how they share the workspace, and their launches.
#pragma once

#include <algorithm>

#include "common/launch.cuh"
#include "htree/attend.cuh"
#include "htree/list.cuh"
#include "htree/scores.cuh"
#include "topk/topk.h"

namespace jax_dsa::htree {

// Parts of the workspace, one behind the other.
struct Parts {
  char* at;
  template <typename T>
  void take(T*& part, int64_t elements) {
    part = reinterpret_cast<T*>(at);
    at += ceil_div(elements * int64_t{sizeof(T)}, int64_t{256}) * 256;
  }
};

// Takes the workspace apart; returns its size.
inline int64_t divide(const HTreeFwdParams& p, int64_t layers, Chunk& chunk) {
  char* const start = static_cast<char*>(p.workspace);
  Parts parts = {start};
  if (layers < 2) return 0;
  chunk.width = p.compression * p.top_k;
  parts.take(chunk.importance, chunk.rows * chunk.width);
  parts.take(chunk.ends, chunk.rows);
  parts.take(chunk.ordinals, chunk.rows * (p.top_k - 1));
  parts.take(chunk.nodes, chunk.rows * p.top_k * (layers - 1));
  parts.take(chunk.masks, chunk.rows * p.top_k * (layers - 1));
  return parts.at - start;
}

// No chunk yet.
inline Pass make_pass(const HTreeFwdParams& p) {
  Pass pass = {};
  pass.p = p;
  pass.layers = htree_layers(p.tokens, p.compression, p.top_k);
  pass.group_heads = static_cast<int>(p.heads / p.groups);
  pass.parts = ceil_div(pass.group_heads, kHeads);
  return pass;
}

// Some of the queries of some batch entries.
struct ChunkOf {
  int64_t batch, entries, query, count;
};
inline void set_range(Pass& pass, const ChunkOf& of) {
  Chunk& chunk = pass.chunk;
  chunk.first_batch = static_cast<int>(of.batch);
  chunk.batch = static_cast<int>(of.entries);
  chunk.first_query = of.query;
  chunk.queries = of.count;
  chunk.rows = of.entries * pass.p.groups * of.count;
}
inline void set_chunk(Pass& pass, const ChunkOf& of) {
  set_range(pass, of);
  divide(pass.p, pass.layers.count, pass.chunk);
}

// run(chunk) for all queries, as many at a time as bytes(chunk), their workspace, has room for:
// whole batch entries where one fits, else parts of one, in whole waves of thread blocks unless the
// last wave is nearly full.
template <typename Bytes, typename Run>
cudaError_t for_chunks(const HTreeFwdParams& p, int tile, Bytes bytes, Run run) {
  const auto part = [&](int64_t fit) {  // queries
    const int64_t entries = std::max<int64_t>(fit / p.queries, 1);
    return ChunkOf{0, std::min(entries, p.batch), 0, std::min(fit, p.queries)};
  };
  int64_t fit = p.batch * p.queries;
  while (fit > 1 && bytes(part(fit)) > p.workspace_bytes) fit -= ceil_div(fit, int64_t{64});
  ChunkOf chunk = part(fit);
  if (bytes(chunk) > p.workspace_bytes) return cudaErrorInvalidValue;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  if (chunk.count < p.queries) {
    const int64_t wave = std::max<int64_t>(device.num_sms / p.groups, 1) * tile;
    const int64_t rest = chunk.count % wave;
    if (chunk.count >= wave && rest * 8 < wave * 7) chunk.count -= rest;
  }
  const ChunkOf most = chunk;
  for (chunk.batch = 0; chunk.batch < p.batch; chunk.batch += most.entries) {
    chunk.entries = std::min(most.entries, p.batch - chunk.batch);
    for (chunk.query = 0; chunk.query < p.queries; chunk.query += most.count) {
      chunk.count = std::min(most.count, p.queries - chunk.query);
      DSA_RETURN_IF_CUDA_ERROR(run(chunk));
    }
  }
  return cudaSuccess;
}

template <typename S, int kD, int kR>
cudaError_t launch_scores(const Pass& pass, int layer, cudaStream_t stream) {
  constexpr int kShared = sizeof(ScoresShared<S, kD, kR>);
  static_assert(shared_memory_fits(1, kShared));
  const Pass shaped = pass.shaped<S>();
  if (shaped.blocks() > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(scores_kernel<S, kD, kR>, shaped.blocks(), S::kThreads, kShared, stream,
                       shaped, layer);
}

inline cudaError_t launch_best(const Pass& pass, cudaStream_t stream) {
  TopkParams best = {};
  best.logits = pass.chunk.importance, best.ends = pass.chunk.ends;
  best.indices = pass.chunk.ordinals;
  best.rows = pass.chunk.rows, best.size = pass.chunk.width, best.k = pass.p.top_k - 1;
  return launch_topk(best, stream);
}

template <int kR, bool kGiven = false>
cudaError_t launch_list(const Pass& pass, int layer, cudaStream_t stream) {
  return launch_blocks(list_kernel<kR, kGiven>, pass.chunk.rows, kListThreads,
                       static_cast<int>(pass.p.top_k) * 4, stream, pass, layer);
}

template <typename S, int kD, int kR>
cudaError_t launch_attend(const Pass& pass, cudaStream_t stream) {
  constexpr int kShared = sizeof(AttendShared<S, kD, kR>);
  static_assert(shared_memory_fits(1, kShared));
  const Pass shaped = pass.shaped<S>();
  if (shaped.blocks() > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(attend_kernel<S, kD, kR>, shaped.blocks(), S::kThreads, kShared, stream,
                       shaped);
}

}  // namespace jax_dsa::htree
