// Launcher of the backward kernels: for as many queries as the workspace has room for, the
// selection's lists, records, queries' gradients, who meets which block, nodes' gradients; at last
// the tokens'.

#include "common/error.h"
#include "htree/bwd_launch.cuh"

namespace jax_dsa {
namespace {

using htree::BwdPlan;
using htree::BwdShape;
using htree::ChunkRange;

template <int kD, int kR>
cudaError_t run(const BwdPlan& x, cudaStream_t stream) {
  const int64_t rows = x.plan.chunk.rows * x.plan.head_tiles;
  if (rows > INT32_MAX / x.plan.p.top_k / x.plan.layers.count ||
      x.lists() * htree::kBwdTilesPerBlock<kR> > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  DSA_RETURN_IF_CUDA_ERROR(htree::launch_restore<kR>(x, stream));
  DSA_RETURN_IF_CUDA_ERROR(htree::launch_pack<kD>(x, stream));
  DSA_RETURN_IF_CUDA_ERROR(htree::launch_queries<BwdShape, kD, kR>(x, stream));
  DSA_RETURN_IF_CUDA_ERROR(htree::launch_visits<kR>(x, stream));
  return htree::launch_nodes<kD, kR>(x, stream);
}

template <int kD, int kR>
cudaError_t run_all(const HTreeBwdParams& p, cudaStream_t stream) {
  BwdPlan x = htree::make_bwd_plan(p);
  const int64_t bytes =
      p.fwd.batch * p.fwd.groups * x.plan.layers.blocks * htree::kNodeBytes<kD, kR> * 2;
  htree::set_chunk(p, x, {});  // the gradients lie first
  DSA_RETURN_IF_CUDA_ERROR(clear(x.gradients, bytes, stream));
  const auto needs = [&](const ChunkRange& of) {
    // A meeting has 16 bits for a record.
    if (of.count * x.plan.head_tiles > 65536) return INT64_MAX;
    return htree_bwd_workspace(p, of.entries * of.count * p.fwd.groups);
  };
  if (p.fwd.batch * p.fwd.queries * p.fwd.heads > 0) {
    const auto chunk = [&](const ChunkRange& of) {
      htree::set_chunk(p, x, of);
      return run<kD, kR>(x, stream);
    };
    DSA_RETURN_IF_CUDA_ERROR(
        htree::for_chunks(p.fwd, BwdShape::kWarps / x.plan.head_tiles, needs, chunk));
  }
  return htree::launch_spread<kD, kR>(p, x, stream);
}

template <int kD>
cudaError_t run_all(const HTreeBwdParams& p, cudaStream_t stream) {
  switch (p.fwd.compression) {
    case 8:
      return run_all<kD, 8>(p, stream);
    case 16:
      return run_all<kD, 16>(p, stream);
    case 32:
      return run_all<kD, 32>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int64_t htree_bwd_workspace(const HTreeBwdParams& p, int64_t rows) {
  HTreeBwdParams none = p;
  none.fwd.workspace = nullptr;
  BwdPlan x = htree::make_bwd_plan(p);
  const int64_t queries = rows / p.fwd.groups;
  const int64_t entries = std::max<int64_t>(queries / std::max<int64_t>(p.fwd.queries, 1), 1);
  htree::set_chunk(none, x, {0, entries, 0, ceil_div(queries, entries)});
  return htree::assign_workspace(none, x);
}

cudaError_t launch_htree_bwd(const HTreeBwdParams& p, cudaStream_t stream) {
  const int64_t heads = p.fwd.groups > 0 ? p.fwd.heads / p.fwd.groups : 0;
  if (p.fwd.groups <= 0 || p.fwd.heads % p.fwd.groups != 0 || heads > kHTreeMaxBwdGroupHeads ||
      p.fwd.top_k < 1 || p.fwd.top_k > kHTreeMaxTopK) {
    return cudaErrorInvalidValue;
  }
  return p.fwd.dim == 128  ? run_all<128>(p, stream)
         : p.fwd.dim == 64 ? run_all<64>(p, stream)
                           : cudaErrorInvalidValue;
}

}  // namespace jax_dsa
