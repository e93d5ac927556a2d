// Host code that the launchers of the backward pass share: the plan and the workspace.
#pragma once

#include <algorithm>
#include <cmath>

#include "htree/bwd_plan.cuh"
#include "htree/chunks.cuh"

namespace jax_dsa::htree {

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

// Launchers of what surrounds the kernels of the two tiers: records (bwd_pack.cuh), lists of visits
// (bwd_lists.cuh) and the gradients of the tokens (bwd_spread.cuh).
cudaError_t launch_pack(const BwdPlan& x, cudaStream_t stream);
cudaError_t launch_visits(const BwdPlan& x, cudaStream_t stream);
cudaError_t launch_spread(const HTreeBwdParams& p, const BwdPlan& x, cudaStream_t stream);

}  // namespace jax_dsa::htree
