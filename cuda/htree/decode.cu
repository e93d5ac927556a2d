// Launcher of decode: a kernel a layer, and a merge.

#include "common/error.h"
#include "htree/decode_launch.cuh"

namespace jax_dsa {
namespace {

using htree::DecodePlan;

static_assert(kHTreeMaxDecodeGroupHeads == htree::kDecodeWarps * htree::kTileHeads);

template <int kD, int kR>
cudaError_t run(const DecodePlan& x, cudaStream_t stream) {
  for (int layer = x.plan.layers.count - 1; layer >= 0; --layer) {
    DSA_RETURN_IF_CUDA_ERROR(htree::launch_layer<kD, kR>(x, layer, stream));
  }
  return htree::launch_combine<kD>(x, stream);
}

template <int kD>
cudaError_t run(const DecodePlan& x, cudaStream_t stream) {
  switch (x.plan.p.compression) {
    case 8:
      return run<kD, 8>(x, stream);
    case 16:
      return run<kD, 16>(x, stream);
    case 32:
      return run<kD, 32>(x, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int64_t htree_decode_workspace(const HTreeDecodeParams& p) {
  DecodePlan x = {};
  HTreeFwdParams none = p.fwd;
  none.workspace = nullptr;
  const int64_t layers = htree_layers(none.tokens, none.compression, none.top_k).count;
  return htree::assign_workspace(none, layers, std::max<int64_t>(htree::decode_rows(none), kMaxSms),
                                 x);
}

cudaError_t launch_htree_decode(const HTreeDecodeParams& params, cudaStream_t stream) {
  const HTreeFwdParams& p = params.fwd;
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (p.groups <= 0 || p.heads % p.groups != 0 || p.heads / p.groups > kHTreeMaxDecodeGroupHeads ||
      p.top_k < 1 || p.top_k > kHTreeMaxTopK || p.dim > 2 * htree::kMaxHalf ||
      p.workspace_bytes < htree_decode_workspace(params)) {
    return cudaErrorInvalidValue;
  }
  DecodePlan x = {};
  DSA_RETURN_IF_CUDA_ERROR(htree::make_decode_plan(params, x));
  return p.dim == 128  ? run<128>(x, stream)
         : p.dim == 64 ? run<64>(x, stream)
                       : cudaErrorInvalidValue;
}

}  // namespace jax_dsa
