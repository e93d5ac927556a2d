// Launcher of the forward kernels: for as many queries as the workspace has room for, layer by
// layer scores, top-k and lists, then the attention.

#include "common/error.h"
#include "htree/launch.cuh"

namespace jax_dsa {
namespace {

using htree::AttendShape;
using htree::Plan;
using htree::ScoresShape;

static_assert(kHTreeMaxGroupHeads == AttendShape::kWarps * htree::kTileHeads);

template <int kD, int kR>
cudaError_t run(const Plan& plan, cudaStream_t stream) {
  if (plan.chunk.rows > INT32_MAX) return cudaErrorInvalidValue;
  for (int layer = plan.layers.count - 1; layer > 0; --layer) {
    DSA_RETURN_IF_CUDA_ERROR(htree::launch_scores<ScoresShape, kD, kR>(plan, layer, stream));
    DSA_RETURN_IF_CUDA_ERROR(htree::launch_best(plan, stream));
    DSA_RETURN_IF_CUDA_ERROR(htree::launch_list<kR>(plan, layer, stream));
  }
  return htree::launch_attend<AttendShape, kD, kR>(plan, stream);
}

template <int kD>
cudaError_t run(const Plan& plan, cudaStream_t stream) {
  switch (plan.p.compression) {
    case 8:
      return run<kD, 8>(plan, stream);
    case 16:
      return run<kD, 16>(plan, stream);
    case 32:
      return run<kD, 32>(plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int64_t htree_fwd_workspace(const HTreeFwdParams& p, int64_t rows) {
  htree::QueryChunk chunk = {};
  chunk.rows = rows;
  HTreeFwdParams none = p;
  none.workspace = nullptr;
  return htree::assign_workspace(none, htree_layers(p.tokens, p.compression, p.top_k).count, chunk);
}

cudaError_t launch_htree_fwd(const HTreeFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (p.groups <= 0 || p.heads % p.groups != 0 || p.heads / p.groups > kHTreeMaxGroupHeads ||
      p.top_k < 1 || p.top_k > kHTreeMaxTopK ||
      (p.compression != 8 && p.compression != 16 && p.compression != 32)) {
    return cudaErrorInvalidValue;
  }
  Plan plan = htree::make_plan(p);
  const auto bytes = [&](const htree::ChunkRange& of) {
    return htree_fwd_workspace(p, of.entries * of.count * p.groups);
  };
  return htree::for_chunks(p, AttendShape::kWarps / plan.head_tiles, bytes,
                           [&](const htree::ChunkRange& of) {
                             htree::set_chunk(plan, of);
                             return p.dim == 128  ? run<128>(plan, stream)
                                    : p.dim == 64 ? run<64>(plan, stream)
                                                  : cudaErrorInvalidValue;
                           });
}

}  // namespace jax_dsa
