// The backward pass: launches. For as many queries at a time as the workspace has room for: lists
// from the selection, records, dQ, lists of visits, gradients of the nodes. At last the gradients
// of the tokens.
#pragma once

#include "htree/bwd_chunks.cuh"
#include "htree/bwd_nodes.cuh"
#include "htree/bwd_queries.cuh"

namespace jax_dsa::htree {

// Restores the selected nodes and masks from the selected ordinals.
inline cudaError_t launch_restore(const BwdPlan& x, cudaStream_t stream) {
  for (int layer = x.plan.layers.count - 1; layer > 0; --layer) {
    DSA_RETURN_IF_CUDA_ERROR(launch_list(x.plan, layer, true, stream));
  }
  return cudaSuccess;
}

template <typename S, int kD, int kR>
cudaError_t launch_queries(const BwdPlan& x, int shared_bytes, cudaStream_t stream) {
  return x.plan.for_head_tiles<S>([&](const Plan& part, int first_head) {
    BwdPlan shaped = x;
    shaped.plan = part.shaped<S>();
    if (shaped.plan.ctas() > INT32_MAX) return cudaErrorInvalidValue;
    const auto y = S::template prepare<QueriesShared<S, kD, kR>>(shaped, shared_bytes, first_head);
    return launch_blocks(queries_kernel<S, kD, kR>, shaped.plan.ctas(), S::kThreads, y.shared_bytes,
                         stream, y.call);
  });
}

template <bool kHopper, int kD, int kR>
cudaError_t launch_nodes(const BwdPlan& x, int shared_bytes, cudaStream_t stream) {
  const auto kernel = nodes_kernel<kHopper, kD, kR>;
  const auto work_tiles = [&](int warps) {  // CTAs that have work, about
    return ceil_div(x.lists(), int64_t{warps}) * kBwdTilesPerBlock<kR>;
  };
  if constexpr (kHopper) {
    return launch_persistent<NodesShared<kD, kR>>(kernel, work_tiles(kNodeWarps), kNodeWarps * 32,
                                                  stream, x);
  } else {
    constexpr int kWarp = sizeof(NodesWarp<kD, kR>);
    static_assert(kWarp <= kMinSharedBytes);
    const int warps = std::min(shared_bytes / kWarp, kNodeWarps);
    Device device;
    DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
    return launch_blocks(kernel, std::min(work_tiles(warps), int64_t{device.num_sms}), warps * 32,
                         warps * kWarp, stream, x);
  }
}

// Runs the backward pass with CTAs of shape S for dQ and up to `shared_bytes` of shared memory.
template <typename S>
cudaError_t launch_bwd(const HTreeBwdParams& p, int shared_bytes, cudaStream_t stream) {
  const HTreeFwdParams& fwd = p.fwd;
  const int64_t heads = fwd.groups > 0 ? fwd.heads / fwd.groups : 0;
  if (fwd.groups <= 0 || fwd.heads % fwd.groups != 0 || heads > kHTreeMaxBwdGroupHeads ||
      fwd.top_k < 1 || fwd.top_k > kHTreeMaxTopK) {
    return cudaErrorInvalidValue;
  }
  return with_dim_and_compression(fwd, [&]<int kD, int kR>() -> cudaError_t {
    BwdPlan x = make_bwd_plan(p);
    const int64_t bytes = fwd.batch * fwd.groups * x.plan.layers.blocks * kNodeBytes<kD, kR> * 2;
    set_chunk(p, x, {});  // the gradients come first in the workspace
    DSA_RETURN_IF_CUDA_ERROR(clear(x.gradients, bytes, stream));
    const auto needs = [&](const ChunkRange& of) {
      // A visit stores the record in 16 bits.
      if (of.queries * x.plan.head_tiles > 65536) return INT64_MAX;
      return htree_bwd_workspace(p, of.batch_entries * of.queries * fwd.groups);
    };
    const auto run = [&](const ChunkRange& of) -> cudaError_t {
      set_chunk(p, x, of);
      const int64_t rows = x.plan.chunk.rows * x.plan.head_tiles;
      if (rows > INT32_MAX / fwd.top_k / x.plan.layers.count ||
          x.lists() * kBwdTilesPerBlock<kR> > INT32_MAX) {
        return cudaErrorInvalidValue;
      }
      DSA_RETURN_IF_CUDA_ERROR(launch_restore(x, stream));
      DSA_RETURN_IF_CUDA_ERROR(launch_pack(x, stream));
      DSA_RETURN_IF_CUDA_ERROR((launch_queries<S, kD, kR>(x, shared_bytes, stream)));
      DSA_RETURN_IF_CUDA_ERROR(launch_visits(x, stream));
      return launch_nodes<S::kHopper, kD, kR>(x, shared_bytes, stream);
    };
    if (fwd.batch * fwd.queries * fwd.heads > 0) {
      DSA_RETURN_IF_CUDA_ERROR(
          for_chunks(fwd, std::max(S::kWarps / x.plan.head_tiles, 1), needs, run));
    }
    return launch_spread(p, x, stream);
  });
}

}  // namespace jax_dsa::htree
