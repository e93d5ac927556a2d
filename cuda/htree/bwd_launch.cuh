// The backward's passes: how they share the workspace, and their launches.
#pragma once

#include "common/error.h"
#include "htree/bwd_lists.cuh"
#include "htree/bwd_nodes.cuh"
#include "htree/bwd_pack.cuh"
#include "htree/bwd_plan.cuh"
#include "htree/bwd_queries.cuh"
#include "htree/bwd_spread.cuh"
#include "htree/launch.cuh"

namespace jax_dsa::htree {

// Eight warps: they hold queries, cotangents and gradients in registers.
using BwdShipped = Shape<8, 232, 64>;

// Takes the workspace apart for the rows of the pass's chunk; returns its size.
inline int64_t divide(const HTreeBwdParams& p, BwdPass& x) {
  char* const start = static_cast<char*>(p.fwd.workspace);
  Parts parts = {start};
  const HTreeLayers& layers = x.pass.layers;
  Chunk& chunk = x.pass.chunk;
  const int64_t r = p.fwd.compression, top_k = p.fwd.top_k, dim = p.fwd.dim;
  parts.take(x.gradients, p.fwd.batch * p.fwd.groups * layers.blocks * 2 * r * dim);
  parts.take(chunk.nodes, chunk.rows * top_k * (layers.count - 1));
  parts.take(chunk.masks, chunk.rows * top_k * (layers.count - 1));
  const int64_t record = dim == 64 ? Record<64>::kBytes : Record<128>::kBytes;
  parts.take(x.records, chunk.rows * x.pass.parts * record);
  x.words = static_cast<int>(ceil_div(chunk.queries, int64_t{32}));
  // Cleared together.
  parts.take(x.next, 2);
  parts.take(x.done, x.lists() * (r < 16 ? 1 : r / 16));
  parts.take(x.marks, x.lists() * x.words);
  parts.take(x.before, x.lists() * x.words);
  parts.take(x.counts, x.lists());
  parts.take(x.starts, x.lists());
  const int64_t meetings = chunk.rows * layers.count * top_k * x.pass.parts;
  parts.take(x.meetings, meetings);
  parts.take(x.items, x.lists() + meetings / kSegment);
  return parts.at - start;
}

inline BwdPass make_bwd_pass(const HTreeBwdParams& p) {
  BwdPass x = {};
  x.pass = make_pass(p.fwd);
  x.out = p.fwd.out, x.lse = p.fwd.lse;
  x.dout = p.dout, x.dlse = p.dlse, x.dq = p.dq;
  return x;
}

inline void set_chunk(const HTreeBwdParams& p, BwdPass& x, const ChunkOf& of) {
  set_range(x.pass, of);
  divide(p, x);
}

// The selection's nodes and masks, from its ordinals.
template <int kR>
cudaError_t launch_restore(const BwdPass& x, cudaStream_t stream) {
  for (int layer = x.pass.layers.count - 1; layer > 0; --layer) {
    DSA_RETURN_IF_CUDA_ERROR(launch_list<kR, true>(x.pass, layer, stream));
  }
  return cudaSuccess;
}

template <int kD>
cudaError_t launch_pack(const BwdPass& x, cudaStream_t stream) {
  return launch_blocks(pack_kernel<kD>, x.pass.chunk.rows * x.pass.parts, kHeads * kD / 8, 0,
                       stream, x);
}

template <typename S, int kD, int kR>
cudaError_t launch_queries(const BwdPass& x, cudaStream_t stream) {
  constexpr int kShared = sizeof(QueriesShared<S, kD, kR>);
  static_assert(shared_memory_fits(1, kShared));
  BwdPass shaped = x;
  shaped.pass = x.pass.shaped<S>();
  if (shaped.pass.blocks() > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(queries_kernel<S, kD, kR>, shaped.pass.blocks(), S::kThreads, kShared,
                       stream, shaped);
}

template <int kR>
cudaError_t launch_meetings(const BwdPass& x, cudaStream_t stream) {
  const int64_t bytes =
      reinterpret_cast<const char*>(x.before) - reinterpret_cast<const char*>(x.next);
  DSA_RETURN_IF_CUDA_ERROR(clear(x.next, bytes, stream));
  DSA_RETURN_IF_CUDA_ERROR(
      launch_blocks(meet_kernel<kR, false>, x.pass.chunk.rows, kMeetThreads, 0, stream, x));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(count_kernel<kCountThreads>,
                                         ceil_div(x.lists(), int64_t{kCountThreads / 32}),
                                         kCountThreads, 0, stream, x));
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(share_kernel<kShareThreads>, 1, kShareThreads,
                                         kShareThreads / 32 * 4, stream, x));
  return launch_blocks(meet_kernel<kR, true>, x.pass.chunk.rows, kMeetThreads, 0, stream, x);
}

template <int kD, int kR>
cudaError_t launch_nodes(const BwdPass& x, cudaStream_t stream) {
  const int64_t pieces = ceil_div(x.lists(), int64_t{kNodeWarps}) * kUnits<kR>;
  return launch_persistent<NodesShared<kD, kR>>(nodes_kernel<kD, kR>, pieces, kNodeWarps * 32,
                                                stream, x);
}

template <int kD, int kR>
cudaError_t launch_spread(const HTreeBwdParams& p, const BwdPass& x, cudaStream_t stream) {
  const Spread spread = {
      .layers = x.pass.layers,
      .gradients = x.gradients,
      .rotations = p.fwd.rotations,
      .dk = static_cast<__nv_bfloat16*>(p.dk),
      .dv = static_cast<__nv_bfloat16*>(p.dv),
      .tokens = p.fwd.tokens,
      .groups = p.fwd.groups,
      .scale = p.fwd.scale,
  };
  constexpr int kTokens = kSpreadThreads / (kD / 2);
  const int64_t blocks = ceil_div(p.fwd.tokens, int64_t{kTokens}) * p.fwd.batch * p.fwd.groups;
  if (blocks == 0) return cudaSuccess;
  return launch_blocks(spread_kernel<kD, kR>, blocks, kSpreadThreads, 0, stream, spread);
}

}  // namespace jax_dsa::htree
