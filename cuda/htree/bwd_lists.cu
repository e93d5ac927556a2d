// Launchers of the backward kernels that both tiers have, and the size of the workspace.

#include "htree/bwd_chunks.cuh"
#include "htree/bwd_lists.cuh"
#include "htree/bwd_pack.cuh"
#include "htree/bwd_spread.cuh"

namespace jax_dsa {
namespace htree {
namespace {

template <int kD>
cudaError_t pack(const BwdPlan& x, cudaStream_t stream) {
  return launch_blocks(pack_kernel<kD>, x.plan.chunk.rows * x.plan.head_tiles, kTileHeads * kD / 8,
                       0, stream, x);
}

template <int kR>
cudaError_t visits(const BwdPlan& x, cudaStream_t stream) {
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
cudaError_t spread(const HTreeBwdParams& p, const BwdPlan& x, cudaStream_t stream) {
  const Spread call = {
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
  return launch_blocks(spread_kernel<kD, kR>, blocks, kSpreadThreads, 0, stream, call);
}

}  // namespace

cudaError_t launch_pack(const BwdPlan& x, cudaStream_t stream) {
  return x.plan.p.dim == 128 ? pack<128>(x, stream) : pack<64>(x, stream);
}

cudaError_t launch_visits(const BwdPlan& x, cudaStream_t stream) {
  return with_compression(x.plan.p.compression, [&]<int kR>() { return visits<kR>(x, stream); });
}

cudaError_t launch_spread(const HTreeBwdParams& p, const BwdPlan& x, cudaStream_t stream) {
  return with_dim_and_compression(p.fwd,
                                  [&]<int kD, int kR>() { return spread<kD, kR>(p, x, stream); });
}

}  // namespace htree

int64_t htree_bwd_workspace(const HTreeBwdParams& p, int64_t rows) {
  HTreeBwdParams none = p;
  none.fwd.workspace = nullptr;
  htree::BwdPlan x = htree::make_bwd_plan(p);
  const int64_t queries = rows / p.fwd.groups;
  const int64_t entries = std::max<int64_t>(queries / std::max<int64_t>(p.fwd.queries, 1), 1);
  htree::set_chunk(none, x, {0, entries, 0, ceil_div(queries, entries)});
  return htree::assign_workspace(none, x);
}

}  // namespace jax_dsa
