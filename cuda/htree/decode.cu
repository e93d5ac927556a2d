// Launcher of decode: one kernel per layer, then the combine.

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

// Returns the shared memory that a CTA of any launch needs at least.
template <int kD, int kR>
int least_shared_bytes(int head_tiles, int width) {
  using namespace htree;
  return std::max(
      DecodeShared<kD, kR, kDecodeTileRows<kR, true>>::bytes(head_tiles, width, true, true, true),
      DecodeShared<kD, kR, kDecodeTileRows<kR, false>>::bytes(head_tiles, width, true, true, true));
}

template <int kD>
int least_shared_bytes(int head_tiles, int compression, int width) {
  return compression == 8    ? least_shared_bytes<kD, 8>(head_tiles, width)
         : compression == 16 ? least_shared_bytes<kD, 16>(head_tiles, width)
                             : least_shared_bytes<kD, 32>(head_tiles, width);
}

}  // namespace

int htree_decode_shared_bytes(int group_heads, int dim, int compression, int top_k) {
  const int tiles = ceil_div(group_heads, htree::kTileHeads), width = compression * top_k;
  return dim == 64 ? least_shared_bytes<64>(tiles, compression, width)
                   : least_shared_bytes<128>(tiles, compression, width);
}

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
