// Host code that the launchers share: the plan, the chunks of queries, and their workspace.
#pragma once

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "htree/walk.cuh"
#include "topk/topk.h"

namespace jax_dsa::htree {

// Returns run.template operator()<r>() for the compression r.
template <typename Run>
cudaError_t with_compression(int64_t compression, Run run) {
  switch (compression) {
    case 8:
      return run.template operator()<8>();
    case 16:
      return run.template operator()<16>();
    case 32:
      return run.template operator()<32>();
  }
  return cudaErrorInvalidValue;
}
// The same with the head dimension D as the first argument.
template <typename Run>
cudaError_t with_dim_and_compression(const HTreeFwdParams& p, Run run) {
  return with_compression(p.compression, [&]<int kR>() {
    return p.dim == 128  ? run.template operator()<128, kR>()
           : p.dim == 64 ? run.template operator()<64, kR>()
                         : cudaErrorInvalidValue;
  });
}

// Hands out arrays from the workspace, one after another, each aligned to 256 bytes.
struct WorkspaceAllocator {
  char* next;
  template <typename T>
  void allocate(T*& array, int64_t elements) {
    array = reinterpret_cast<T*>(next);
    next += ceil_div(elements * int64_t{sizeof(T)}, int64_t{256}) * 256;
  }
};

// Assigns the chunk's arrays in the workspace; returns its size in bytes.
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

// Returns the plan without a chunk.
inline Plan make_plan(const HTreeFwdParams& p) {
  Plan plan = {};
  plan.p = p;
  plan.layers = htree_layers(p.tokens, p.compression, p.top_k);
  plan.group_heads = static_cast<int>(p.heads / p.groups);
  plan.head_tiles = ceil_div(plan.group_heads, kTileHeads);
  return plan;
}

// Queries first_query to first_query + queries - 1 of `batch_entries` batch entries.
struct ChunkRange {
  int64_t first_batch, batch_entries, first_query, queries;
};
inline void set_range(Plan& plan, const ChunkRange& of) {
  QueryChunk& chunk = plan.chunk;
  chunk.first_batch = static_cast<int>(of.first_batch);
  chunk.batch = static_cast<int>(of.batch_entries);
  chunk.first_query = of.first_query;
  chunk.queries = of.queries;
  chunk.rows = of.batch_entries * plan.p.groups * of.queries;
}
inline void set_chunk(Plan& plan, const ChunkRange& of) {
  set_range(plan, of);
  assign_workspace(plan.p, plan.layers.count, plan.chunk);
}

// Calls run(range) for all queries, as many at a time as fit into the workspace by bytes(range):
// whole batch entries if one fits, otherwise some of the queries of one. The latter are whole
// waves of CTAs unless the last wave is nearly full.
template <typename Bytes, typename Run>
cudaError_t for_chunks(const HTreeFwdParams& p, int tile_queries, Bytes bytes, Run run) {
  const auto range_of = [&](int64_t fit) {  // fit: number of queries
    const int64_t entries = std::max<int64_t>(fit / p.queries, 1);
    return ChunkRange{0, std::min(entries, p.batch), 0, std::min(fit, p.queries)};
  };
  int64_t fit = p.batch * p.queries;
  while (fit > 1 && bytes(range_of(fit)) > p.workspace_bytes) fit -= ceil_div(fit, int64_t{64});
  ChunkRange chunk = range_of(fit);
  if (bytes(chunk) > p.workspace_bytes) return cudaErrorInvalidValue;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  if (chunk.queries < p.queries) {
    const int64_t wave = std::max<int64_t>(device.num_sms / p.groups, 1) * tile_queries;
    const int64_t rest = chunk.queries % wave;
    if (chunk.queries >= wave && rest * 8 < wave * 7) chunk.queries -= rest;
  }
  const ChunkRange most = chunk;
  for (chunk.first_batch = 0; chunk.first_batch < p.batch;
       chunk.first_batch += most.batch_entries) {
    chunk.batch_entries = std::min(most.batch_entries, p.batch - chunk.first_batch);
    for (chunk.first_query = 0; chunk.first_query < p.queries; chunk.first_query += most.queries) {
      chunk.queries = std::min(most.queries, p.queries - chunk.first_query);
      DSA_RETURN_IF_CUDA_ERROR(run(chunk));
    }
  }
  return cudaSuccess;
}

inline cudaError_t launch_best(const Plan& plan, cudaStream_t stream) {
  TopkParams best = {};
  best.logits = plan.chunk.importance, best.ends = plan.chunk.ends;
  best.indices = plan.chunk.ordinals;
  best.rows = plan.chunk.rows, best.size = plan.chunk.width, best.k = plan.p.top_k - 1;
  return launch_topk(best, stream);
}

// Lists what the rows selected in a layer; see list.cuh.
cudaError_t launch_list(const Plan& plan, int layer, bool given, cudaStream_t stream);

}  // namespace jax_dsa::htree
