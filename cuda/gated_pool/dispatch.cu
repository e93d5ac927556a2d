// Launchers of gated pooling.

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "gated_pool/pool.cuh"

namespace jax_dsa {
namespace {

using namespace gated_pool;

bool is_few(int ratio, int halves) { return ratio * halves <= Few::kMaxContributions; }

cudaError_t check(const GatedPoolParams& p) {
  const bool fits = p.ratio > 0 && (p.halves == 1 || p.halves == 2) &&
                    int64_t{p.ratio} * p.halves <= kGatedPoolMaxPooled && p.dim % kWidth == 0 &&
                    p.tokens <= INT32_MAX - 4 * kGatedPoolMaxPooled &&
                    p.batch * ceil_div(p.tokens, int64_t{p.ratio}) <= INT32_MAX;
  return fits ? cudaSuccess : cudaErrorInvalidValue;
}

// Calls f<dtype, shape>().
template <typename F>
cudaError_t dispatch(const GatedPoolParams& p, F f) {
  const auto typed = [&]<DType kType>() {
    const auto matches = [&](int ratio, int halves) {
      return p.ratio == ratio && p.halves == halves;
    };
    return matches(4, 2)               ? f.template operator()<kType, Few4>()
           : matches(4, 1)             ? f.template operator()<kType, Few4Single>()
           : matches(128, 1)           ? f.template operator()<kType, Many128>()
           : is_few(p.ratio, p.halves) ? f.template operator()<kType, Few>()
                                       : f.template operator()<kType, Many>();
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

}  // namespace

cudaError_t launch_gated_pool_fwd(const GatedPoolFwdParams& params, cudaStream_t stream) {
  const GatedPoolParams& p = params.in;
  DSA_RETURN_IF_CUDA_ERROR(check(p));
  const int64_t slots = p.tokens / p.ratio, keys = p.batch * slots;
  if (keys == 0 || p.dim == 0) return cudaSuccess;
  return dispatch(p, [&]<DType kType, typename Shape>() {
    const int tiles = ceil_div(p.dim, Shape::kTile);
    constexpr int kCtasPerSm = kType == DType::kF32 ? 4 : 5;
    return launch_blocks(fwd_kernel<kType, Shape, kCtasPerSm>,
                         ceil_div(keys, int64_t{Shape::kThreadGroups}) * tiles, kThreads,
                         Shape::kRanks == 1 ? 0 : sizeof(CombineShared<Shape>), stream, params,
                         static_cast<uint32_t>(keys), static_cast<uint32_t>(slots), tiles);
  });
}

int gated_pool_tiles(int ratio, int halves, int dim) {
  return ceil_div(dim, is_few(ratio, halves) ? Few::kTile : Many::kTile);
}

int64_t gated_pool_bwd_splits(int64_t batch, int64_t tokens, int ratio, int halves, int dim) {
  const bool few = is_few(ratio, halves);
  const int64_t slots = ceil_div(tokens, int64_t{ratio});
  const int64_t max_splits =
      ceil_div(slots, int64_t{few ? Few::kThreadGroups : Many::kThreadGroups});
  const int64_t ctas_per_split = std::max(int64_t{1}, batch * gated_pool_tiles(ratio, halves, dim));
  const int ctas_per_sm =
      ratio == 4 && halves == 1 ? Few4Single::kBwdCtasPerSm : Few::kBwdCtasPerSm;
  return std::max(int64_t{1}, std::min(max_splits, kMaxSms * ctas_per_sm / ctas_per_split));
}

cudaError_t launch_gated_pool_bwd(const GatedPoolBwdParams& params, cudaStream_t stream) {
  const GatedPoolParams& p = params.in;
  DSA_RETURN_IF_CUDA_ERROR(check(p));
  if (params.splits < 1) return cudaErrorInvalidValue;
  if (p.batch == 0 || p.dim == 0) return cudaSuccess;
  // One slot more than there are keys covers the tokens at the end, whose gradients are zero.
  const auto slots = static_cast<int>(ceil_div(p.tokens, int64_t{p.ratio}));
  return dispatch(p, [&]<DType kType, typename Shape>() {
    const int tiles = ceil_div(p.dim, Shape::kTile);
    return launch_blocks(
        bwd_kernel<kType, Shape>, p.batch * params.splits * tiles, kThreads,
        Shape::kRanks == 1 ? sizeof(SumsShared<Shape>) : sizeof(CombineShared<Shape>), stream,
        params, slots, tiles);
  });
}

}  // namespace jax_dsa
