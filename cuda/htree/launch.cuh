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
struct WorkspaceAllocator {
  char* next;
  template <typename T>
  void allocate(T*& array, int64_t elements) {
    array = reinterpret_cast<T*>(next);
    next += ceil_div(elements * int64_t{sizeof(T)}, int64_t{256}) * 256;
  }
};

// Takes the workspace apart; returns its size.
inline int64_t assign_workspace(const HTreeFwdParams& p, int64_t layers, QueryChunk& chunk) {
  char* const start = static_cast<char*>(p.workspace);
  WorkspaceAllocator workspace = {start};
  if (layers < 2) return 0;
  chunk.width = p.compression * p.top_k;
  workspace.allocate(chunk.importance, chunk.rows * chunk.width);
  workspace.allocate(chunk.ends, chunk.rows);
  workspace.allocate(chunk.ordinals, chunk.rows * (p.top_k - 1));
  workspace.allocate(chunk.nodes, chunk.rows * p.top_k * (layers - 1));
  workspace.allocate(chunk.masks, chunk.rows * p.top_k * (layers - 1));
  return workspace.next - start;
}

// No chunk yet.
inline Plan make_plan(const HTreeFwdParams& p) {
  Plan plan = {};
  plan.p = p;
  plan.layers = htree_layers(p.tokens, p.compression, p.top_k);
  plan.group_heads = static_cast<int>(p.heads / p.groups);
  plan.head_tiles = ceil_div(plan.group_heads, kTileHeads);
  return plan;
}

// Some of the queries of some batch entries.
struct ChunkRange {
  int64_t batch, entries, query, count;
};
inline void set_range(Plan& plan, const ChunkRange& of) {
  QueryChunk& chunk = plan.chunk;
  chunk.first_batch = static_cast<int>(of.batch);
  chunk.batch = static_cast<int>(of.entries);
  chunk.first_query = of.query;
  chunk.queries = of.count;
  chunk.rows = of.entries * plan.p.groups * of.count;
}
inline void set_chunk(Plan& plan, const ChunkRange& of) {
  set_range(plan, of);
  assign_workspace(plan.p, plan.layers.count, plan.chunk);
}

// run(chunk) for all queries, as many at a time as bytes(chunk), their workspace, has room for:
// whole batch entries where one fits, else parts of one, in whole waves of thread blocks unless the
// last wave is nearly full.
template <typename Bytes, typename Run>
cudaError_t for_chunks(const HTreeFwdParams& p, int tile_queries, Bytes bytes, Run run) {
  const auto range_of = [&](int64_t fit) {  // queries
    const int64_t entries = std::max<int64_t>(fit / p.queries, 1);
    return ChunkRange{0, std::min(entries, p.batch), 0, std::min(fit, p.queries)};
  };
  int64_t fit = p.batch * p.queries;
  while (fit > 1 && bytes(range_of(fit)) > p.workspace_bytes) fit -= ceil_div(fit, int64_t{64});
  ChunkRange chunk = range_of(fit);
  if (bytes(chunk) > p.workspace_bytes) return cudaErrorInvalidValue;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  if (chunk.count < p.queries) {
    const int64_t wave = std::max<int64_t>(device.num_sms / p.groups, 1) * tile_queries;
    const int64_t rest = chunk.count % wave;
    if (chunk.count >= wave && rest * 8 < wave * 7) chunk.count -= rest;
  }
  const ChunkRange most = chunk;
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
cudaError_t launch_scores(const Plan& plan, int layer, cudaStream_t stream) {
  constexpr int kShared = sizeof(ScoresShared<S, kD, kR>);
  static_assert(shared_memory_fits(1, kShared));
  const Plan shaped = plan.shaped<S>();
  if (shaped.ctas() > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(scores_kernel<S, kD, kR>, shaped.ctas(), S::kThreads, kShared, stream,
                       shaped, layer);
}

inline cudaError_t launch_best(const Plan& plan, cudaStream_t stream) {
  TopkParams best = {};
  best.logits = plan.chunk.importance, best.ends = plan.chunk.ends;
  best.indices = plan.chunk.ordinals;
  best.rows = plan.chunk.rows, best.size = plan.chunk.width, best.k = plan.p.top_k - 1;
  return launch_topk(best, stream);
}

template <int kR, bool kGiven = false>
cudaError_t launch_list(const Plan& plan, int layer, cudaStream_t stream) {
  return launch_blocks(list_kernel<kR, kGiven>, plan.chunk.rows, kListThreads,
                       static_cast<int>(plan.p.top_k) * 4, stream, plan, layer);
}

template <typename S, int kD, int kR>
cudaError_t launch_attend(const Plan& plan, cudaStream_t stream) {
  constexpr int kShared = sizeof(AttendShared<S, kD, kR>);
  static_assert(shared_memory_fits(1, kShared));
  const Plan shaped = plan.shaped<S>();
  if (shaped.ctas() > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(attend_kernel<S, kD, kR>, shaped.ctas(), S::kThreads, kShared, stream,
                       shaped);
}

}  // namespace jax_dsa::htree
