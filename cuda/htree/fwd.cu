// Launcher of the forward kernels: for as many queries as the workspace has room for, layer by
// layer scores, top-k and lists, then the attention.

#include "common/error.h"
#include "htree/launch.cuh"

namespace jax_dsa {
namespace {

using htree::Pass;
using htree::Shipped;
using htree::ShippedScores;

static_assert(kHTreeMaxGroupHeads == Shipped::kWarps * htree::kHeads);

template <int kD, int kR>
cudaError_t run(const Pass& pass, cudaStream_t stream) {
  if (pass.chunk.rows > INT32_MAX) return cudaErrorInvalidValue;
  for (int layer = pass.layers.count - 1; layer > 0; --layer) {
    DSA_RETURN_IF_CUDA_ERROR(htree::launch_scores<ShippedScores, kD, kR>(pass, layer, stream));
    DSA_RETURN_IF_CUDA_ERROR(htree::launch_best(pass, stream));
    DSA_RETURN_IF_CUDA_ERROR(htree::launch_list<kR>(pass, layer, stream));
  }
  return htree::launch_attend<Shipped, kD, kR>(pass, stream);
}

template <int kD>
cudaError_t run(const Pass& pass, cudaStream_t stream) {
  switch (pass.p.compression) {
    case 8:
      return run<kD, 8>(pass, stream);
    case 16:
      return run<kD, 16>(pass, stream);
    case 32:
      return run<kD, 32>(pass, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int64_t htree_fwd_workspace(const HTreeFwdParams& p, int64_t rows) {
  htree::Chunk chunk = {};
  chunk.rows = rows;
  HTreeFwdParams none = p;
  none.workspace = nullptr;
  return htree::divide(none, htree_layers(p.tokens, p.compression, p.top_k).count, chunk);
}

cudaError_t launch_htree_fwd(const HTreeFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (p.groups <= 0 || p.heads % p.groups != 0 || p.heads / p.groups > kHTreeMaxGroupHeads ||
      p.top_k < 1 || p.top_k > kHTreeMaxTopK ||
      (p.compression != 8 && p.compression != 16 && p.compression != 32)) {
    return cudaErrorInvalidValue;
  }
  Pass pass = htree::make_pass(p);
  const auto bytes = [&](const htree::ChunkOf& of) {
    return htree_fwd_workspace(p, of.entries * of.count * p.groups);
  };
  return htree::for_chunks(p, Shipped::kWarps / pass.parts, bytes, [&](const htree::ChunkOf& of) {
    htree::set_chunk(pass, of);
    return p.dim == 128  ? run<128>(pass, stream)
           : p.dim == 64 ? run<64>(pass, stream)
                         : cudaErrorInvalidValue;
  });
}

}  // namespace jax_dsa
