// Launcher of the lists, and the size of the forward pass's workspace.

#include "htree/chunks.cuh"
#include "htree/list.cuh"

namespace jax_dsa {

cudaError_t htree::launch_list(const Plan& plan, int layer, bool given, cudaStream_t stream) {
  return with_compression(plan.p.compression, [&]<int kR>() {
    return launch_blocks(given ? list_kernel<kR, true> : list_kernel<kR, false>, plan.chunk.rows,
                         kListThreads, static_cast<int>(plan.p.top_k) * 4, stream, plan, layer);
  });
}

int64_t htree_fwd_workspace(const HTreeFwdParams& p, int64_t rows) {
  htree::QueryChunk chunk = {};
  chunk.rows = rows;
  HTreeFwdParams none = p;
  none.workspace = nullptr;
  return htree::assign_workspace(none, htree_layers(p.tokens, p.compression, p.top_k).count, chunk);
}

}  // namespace jax_dsa
