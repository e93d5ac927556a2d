// The forward pass: launches. For as many queries at a time as the workspace has room for: layer
// by layer scores, top-k and lists, then the attention.
#pragma once

#include "htree/attend.cuh"
#include "htree/chunks.cuh"
#include "htree/scores.cuh"

namespace jax_dsa::htree {

template <typename S, int kD, int kR>
cudaError_t launch_scores(const Plan& plan, int layer, int shared_bytes, cudaStream_t stream) {
  const auto x = S::template prepare<ScoresShared<S, kD, kR>>(plan.shaped<S>(), shared_bytes, 0);
  if (x.call.ctas() > INT32_MAX) return cudaErrorInvalidValue;
  return launch_blocks(scores_kernel<S, kD, kR>, x.call.ctas(), S::kThreads, x.shared_bytes, stream,
                       x.call, layer);
}

template <typename S, int kD, int kR>
cudaError_t launch_attend(const Plan& plan, int shared_bytes, cudaStream_t stream) {
  return plan.for_head_tiles<S>([&](const Plan& part, int first_head) {
    const auto x =
        S::template prepare<AttendShared<S, kD, kR>>(part.shaped<S>(), shared_bytes, first_head);
    if (x.call.ctas() > INT32_MAX) return cudaErrorInvalidValue;
    return launch_blocks(attend_kernel<S, kD, kR>, x.call.ctas(), S::kThreads, x.shared_bytes,
                         stream, x.call);
  });
}

// Runs the forward pass with CTAs that have these shapes and up to `shared_bytes` of shared memory.
template <typename Scores, typename Attend>
cudaError_t launch_fwd(const HTreeFwdParams& p, int shared_bytes, cudaStream_t stream) {
  static_assert(kHTreeMaxGroupHeads <= Scores::kWarps * kTileHeads);
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (p.groups <= 0 || p.heads % p.groups != 0 || p.heads / p.groups > kHTreeMaxGroupHeads ||
      p.top_k < 1 || p.top_k > kHTreeMaxTopK ||
      (p.compression != 8 && p.compression != 16 && p.compression != 32)) {
    return cudaErrorInvalidValue;
  }
  Plan plan = make_plan(p);
  const auto bytes = [&](const ChunkRange& of) {
    return htree_fwd_workspace(p, of.batch_entries * of.queries * p.groups);
  };
  const auto run = [&]<int kD, int kR>() -> cudaError_t {
    if (plan.chunk.rows > INT32_MAX) return cudaErrorInvalidValue;
    for (int layer = plan.layers.count - 1; layer > 0; --layer) {
      DSA_RETURN_IF_CUDA_ERROR((launch_scores<Scores, kD, kR>(plan, layer, shared_bytes, stream)));
      DSA_RETURN_IF_CUDA_ERROR(launch_best(plan, stream));
      DSA_RETURN_IF_CUDA_ERROR(launch_list(plan, layer, false, stream));
    }
    return launch_attend<Attend, kD, kR>(plan, shared_bytes, stream);
  };
  return for_chunks(p, std::max(Attend::kWarps / plan.head_tiles, 1), bytes,
                    [&](const ChunkRange& of) {
                      set_chunk(plan, of);
                      return with_dim_and_compression(p, run);
                    });
}

}  // namespace jax_dsa::htree
