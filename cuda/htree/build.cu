// Launcher of the kernels that build the tree.

#include "common/error.h"
#include "common/launch.cuh"
#include "htree/build.cuh"

namespace jax_dsa {
namespace {

template <int kD, int kR>
cudaError_t launch(const HTreeBuildParams& p, cudaStream_t stream) {
  using namespace htree;
  const int64_t rows = p.compression * p.top_k;
  const HTreeLayers layers = htree_layers(p.tokens, p.compression, p.top_k);
  const int64_t groups = p.batch * p.groups;
  if (ceil_div(p.tokens, int64_t{kR} * kR) * groups > INT32_MAX) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(
      rotations_kernel<kD / 2>, ceil_div(rows, int64_t{kRotationRows}), kRotationThreads, 0, stream,
      reinterpret_cast<float2*>(p.rotations), rows, make_frequencies(kD, p.rope_base)));
  if (groups == 0 || p.tokens == 0) return cudaSuccess;
  BuildPlan plan = {};
  plan.layers = layers;
  plan.k = static_cast<const __nv_bfloat16*>(p.k), plan.v = static_cast<const __nv_bfloat16*>(p.v);
  plan.node_stride = p.groups * kD, plan.group_stride = kD;
  plan.batch_stride = p.tokens * plan.node_stride;
  plan.above = static_cast<__nv_bfloat16*>(p.workspace);
  plan.tree = static_cast<uint8_t*>(p.tree), plan.rotations = p.rotations;
  plan.groups = static_cast<int>(p.groups);
  for (plan.layer = 0; plan.layer < layers.count; plan.layer += 2) {
    const int64_t spans = ceil_div(layers.size[plan.layer], int64_t{kR} * kR);
    DSA_RETURN_IF_CUDA_ERROR(launch_pdl(build_kernel<kD, kR>, spans * groups, kBuildThreads<kD, kR>,
                                        static_cast<int>(sizeof(BuildShared<kD, kR>)), stream,
                                        plan));
    if (plan.layer + 2 >= layers.count) break;
    const int64_t nodes = layers.size[plan.layer + 2];
    plan.k = plan.above, plan.v = plan.above + kD;
    plan.node_stride = 2 * kD, plan.group_stride = nodes * 2 * kD;
    plan.batch_stride = p.groups * plan.group_stride;
    plan.above += groups * nodes * 2 * kD;
  }
  return cudaSuccess;
}

template <int kD>
cudaError_t launch(const HTreeBuildParams& p, cudaStream_t stream) {
  switch (p.compression) {
    case 8:
      return launch<kD, 8>(p, stream);
    case 16:
      return launch<kD, 16>(p, stream);
    case 32:
      return launch<kD, 32>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_htree_build(const HTreeBuildParams& p, cudaStream_t stream) {
  if (p.top_k < 1 || p.top_k > kHTreeMaxTopK) return cudaErrorInvalidValue;
  switch (p.dim) {
    case 64:
      return launch<64>(p, stream);
    case 128:
      return launch<128>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa
