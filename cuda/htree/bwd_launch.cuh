// The backward pass: workspace layout and launches.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/error.h"
#include "htree/bwd_lists.cuh"
#include "htree/bwd_nodes.cuh"
#include "htree/bwd_pack.cuh"
#include "htree/bwd_plan.cuh"
#include "htree/bwd_queries.cuh"
#include "htree/bwd_spread.cuh"
#include "htree/launch.cuh"

namespace jax_dsa::htree {

// Eight warps with 232 registers per thread: they hold queries, dO and dQ in registers.
using BwdShape = CtaShape<8, 232, 64>;

// Assigns the arrays for the rows of the plan's chunk in the workspace; returns its size in
// bytes.
inline int64_t assign_workspace(const HTreeBwdParams& p, BwdPlan& x) {
  char* const start = static_cast<char*>(p.fwd.workspace);
  WorkspaceAllocator workspace = {start};
  const HTreeLayers& layers = x.plan.layers;
  QueryChunk& chunk = x.plan.chunk;
  const int64_t r = p.fwd.compression, top_k = p.fwd.top_k, dim = p.fwd.dim;
  workspace.allocate(x.gradients, p.fwd.batch * p.fwd.groups * layers.blocks * 2 * r * dim);
  workspace.allocate(chunk.nodes, chunk.rows * top_k * (layers.count - 1));
  workspace.allocate(chunk.masks, chunk.rows * top_k * (layers.count - 1));
  const int64_t record = dim == 64 ? Record<64>::kBytes : Record<128>::kBytes;
  workspace.allocate(x.records, chunk.rows * x.plan.head_tiles * record);
  x.words = static_cast<int>(ceil_div(chunk.queries, int64_t{32}));
  // tile_counter, done and marks are cleared together.
  workspace.allocate(x.tile_counter, 2);
  workspace.allocate(x.done, x.lists() * (r < 16 ? 1 : r / 16));
  workspace.allocate(x.marks, x.lists() * x.words);
  workspace.allocate(x.marks_before, x.lists() * x.words);
  workspace.allocate(x.counts, x.lists());
  workspace.allocate(x.starts, x.lists());
  const int64_t visits = chunk.rows * layers.count * top_k * x.plan.head_tiles;
  workspace.allocate(x.visits, visits);
  workspace.allocate(x.work_tiles, x.lists() + visits / kSegment);
  return workspace.next - start;
}

inline BwdPlan make_bwd_plan(const HTreeBwdParams& p) {
  BwdPlan x = {};
  x.plan = make_plan(p.fwd);
  x.out = p.fwd.out, x.max_logit = p.fwd.max_logit, x.log_sum = p.fwd.log_sum;
  x.dout = p.dout, x.dlse = p.dlse, x.dq = p.dq;
  x.first_factor =
      p.fwd.scale == 0.f ? 1.f : std::exp2(std::clamp(std::ilogb(p.fwd.scale), -16, 0));
  x.last_factor = p.fwd.scale / x.first_factor;
  return x;
}

inline void set_chunk(const HTreeBwdParams& p, BwdPlan& x, const ChunkRange& of) {
  set_range(x.plan, of);
  assign_workspace(p, x);
}

// Restores the selected nodes and masks from the selected ordinals.
template <int kR>
cudaError_t launch_restore(const BwdPlan& x, cudaStream_t stream) {
  for (int layer = x.plan.layers.count - 1; layer > 0; --layer) {
    DSA_RETURN_IF_CUDA_ERROR(launch_list<kR, true>(x.plan, layer, stream));
  }
  return cudaSuccess;
}

template <int kD>
cudaError_t launch_pack(const BwdPlan& x, cudaStream_t stream) {
  return launch_blocks(pack_kernel<kD>, x.plan.chunk.rows * x.plan.head_tiles, kTileHeads * kD / 8,
                       0, stream, x);
}

template <typename S, int kD, int kR>
cudaError_t launch_queries(const BwdPlan& x, cudaStream_t stream) {
  constexpr int kShared = sizeof(QueriesShared<S, kD, kR>);
  static_assert(shared_memory_fits(1, kShared));
  BwdPlan shaped = x;
  shaped.plan = x.plan.shaped<S>();
  if (shaped.plan.ctas() > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(queries_kernel<S, kD, kR>, shaped.plan.ctas(), S::kThreads, kShared, stream,
                       shaped);
}

template <int kR>
cudaError_t launch_visits(const BwdPlan& x, cudaStream_t stream) {
  const int64_t bytes =
      reinterpret_cast<const char*>(x.marks_before) - reinterpret_cast<const char*>(x.tile_counter);
  DSA_RETURN_IF_CUDA_ERROR(clear(x.tile_counter, bytes, stream));
  DSA_RETURN_IF_CUDA_ERROR(
      launch_blocks(visit_kernel<kR, false>, x.plan.chunk.rows, kVisitThreads, 0, stream, x));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(count_kernel<kCountThreads>,
                                         ceil_div(x.lists(), int64_t{kCountThreads / 32}),
                                         kCountThreads, 0, stream, x));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(schedule_kernel<kScheduleThreads>, 1, kScheduleThreads,
                                         kScheduleThreads / 32 * 4, stream, x));
  return launch_blocks(visit_kernel<kR, true>, x.plan.chunk.rows, kVisitThreads, 0, stream, x);
}

template <int kD, int kR>
cudaError_t launch_nodes(const BwdPlan& x, cudaStream_t stream) {
  const int64_t work_tiles = ceil_div(x.lists(), int64_t{kNodeWarps}) * kBwdTilesPerBlock<kR>;
  return launch_persistent<NodesShared<kD, kR>>(nodes_kernel<kD, kR>, work_tiles, kNodeWarps * 32,
                                                stream, x);
}

template <int kD, int kR>
cudaError_t launch_spread(const HTreeBwdParams& p, const BwdPlan& x, cudaStream_t stream) {
  const Spread spread = {
      .layers = x.plan.layers,
      .gradients = x.gradients,
      .rotations = p.fwd.rotations,
      .dk = static_cast<__nv_bfloat16*>(p.dk),
      .dv = static_cast<__nv_bfloat16*>(p.dv),
      .tokens = p.fwd.tokens,
      .groups = p.fwd.groups,
      .key_factor = x.last_factor,
      .value_factor = 1.f / x.first_factor,
  };
  constexpr int kTokens = kSpreadThreads / (kD / 2);
  const int64_t blocks = ceil_div(p.fwd.tokens, int64_t{kTokens}) * p.fwd.batch * p.fwd.groups;
  if (blocks == 0) return cudaSuccess;
  return launch_blocks(spread_kernel<kD, kR>, blocks, kSpreadThreads, 0, stream, spread);
}

}  // namespace jax_dsa::htree
