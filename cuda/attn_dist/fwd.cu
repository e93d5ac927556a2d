// Launcher of the attn_dist forward kernels.

#include <algorithm>

#include "attn_dist/attn_dist.h"
#include "attn_dist/fwd.cuh"

namespace jax_dsa {
namespace {

template <int kD>
cudaError_t launch(const AttnDistFwdParams& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess) {
    return e;
  }
  const auto kernel = attn_dist::fwd_kernel<kD>;
  constexpr int kBytes = sizeof(attn_dist::Shared<kD>);
  static_assert(kBytes <= 227 * 1024);
  if (cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      e != cudaSuccess) {
    return e;
  }
  const int64_t items = attn_dist::item_count(p);
  if (items > INT32_MAX - 4096) return cudaErrorInvalidValue;
  const int64_t tiles = items * ceil_div(p.slots, attn_dist::kTile);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, processors));
  kernel<<<grid, attn_dist::kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_attn_dist_fwd(const AttnDistFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0 || p.slots == 0) return cudaSuccess;
  if (p.groups <= 0 || p.heads % p.groups != 0 || p.head_group <= 0 ||
      p.heads / p.groups % p.head_group != 0) {
    return cudaErrorInvalidValue;
  }
  switch (p.dim) {
    case 576:
      return launch<576>(p, stream);
    case 512:
      return launch<512>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa
