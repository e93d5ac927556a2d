// Launchers of mean pooling.

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "gated_pool/mean.cuh"

namespace jax_dsa {
namespace {

using namespace gated_pool;

// Calls launch<dtype, whether `starts` is given>().
template <typename F>
cudaError_t dispatch(const MeanPoolParams& p, F launch) {
  const auto typed = [&]<DType kType>() {
    return p.starts ? launch.template operator()<kType, true>()
                    : launch.template operator()<kType, false>();
  };
  switch (p.dtype) {
    case DType::kBF16:
      return typed.template operator()<DType::kBF16>();
    case DType::kF16:
      return typed.template operator()<DType::kF16>();
    case DType::kF32:
      return typed.template operator()<DType::kF32>();
  }
  return cudaErrorInvalidValue;
}

// Launches a warp for each unit and each tile of channels.
cudaError_t launch_warps(void (*kernel)(MeanPoolParams, uint32_t, uint32_t),
                         const MeanPoolParams& p, int64_t units_per_entry, cudaStream_t stream) {
  const int tiles = ceil_div(p.dim, kMeanTile);
  const int64_t units = p.batch * units_per_entry;
  const int64_t blocks = ceil_div(units, int64_t{kWarps}) * tiles;
  if (std::max(units, blocks) > INT32_MAX - kWarps) return cudaErrorInvalidValue;
  if (blocks == 0) return cudaSuccess;
  return launch_blocks(kernel, blocks, kThreads, 0, stream, p,
                       static_cast<uint32_t>(units_per_entry), static_cast<uint32_t>(tiles));
}

template <DType kType, int kRatio, bool kPacked>
cudaError_t launch_fwd(const MeanPoolParams& p, cudaStream_t stream) {
  return launch_warps(mean_fwd_kernel<kType, kRatio, kPacked>, p,
                      ceil_div(p.tokens / p.ratio, int64_t{kKeysPerWarp<kRatio>}), stream);
}

bool fits(const MeanPoolParams& p) {
  return p.ratio > 0 && p.ratio <= kGatedPoolMaxPooled && p.dim % kWidth == 0 &&
         p.tokens <= INT32_MAX - 4 * kGatedPoolMaxPooled;
}

}  // namespace

cudaError_t launch_mean_pool_fwd(const MeanPoolParams& p, cudaStream_t stream) {
  if (!fits(p)) return cudaErrorInvalidValue;
  return dispatch(p, [&]<DType kType, bool kPacked>() {
    return p.ratio == 4 ? launch_fwd<kType, 4, kPacked>(p, stream)
                        : launch_fwd<kType, 0, kPacked>(p, stream);
  });
}

cudaError_t launch_mean_pool_bwd(const MeanPoolParams& p, cudaStream_t stream) {
  if (!fits(p)) return cudaErrorInvalidValue;
  return dispatch(p, [&]<DType kType, bool kPacked>() {
    return launch_warps(mean_bwd_kernel<kType, kPacked>, p,
                        ceil_div(p.tokens, int64_t{kRowsPerWarp}), stream);
  });
}

}  // namespace jax_dsa
