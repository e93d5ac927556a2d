// Launches the portable kernels of forward passes. The variants for e4m3 are a translation unit of
// their own, because they depend on the conversions that a GPU has.
#pragma once

#include <algorithm>

#include "common/launch.cuh"
#include "indexer/portable_blocks.cuh"
#include "indexer/portable_candidates.cuh"
#include "indexer/portable_fwd.cuh"

namespace jax_dsa::indexer {

template <typename Tr>
cudaError_t launch_portable_fwd(const IndexerFwdParams& p, const Device& device,
                                cudaStream_t stream) {
  static_assert(2 * (sizeof(PortableFwdShared<Tr>) + kReservedSharedBytes) <=
                kMinSharedBytes + kReservedSharedBytes);
  PortablePlan plan = {};
  plan.tile_queries = kTileRows / padded_heads(p.heads);
  plan.key_tiles = ceil_div(p.keys, int64_t{kCtaRows});
  // Loading keys takes as long as several query tiles, but an SM should get about 32 CTAs.
  const int64_t tiles = ceil_div(p.queries, int64_t{plan.tile_queries});
  const int64_t even = p.batch * plan.key_tiles * tiles / (int64_t{32} * device.num_sms);
  plan.query_tiles =
      static_cast<int>(std::clamp<int64_t>(even, std::min<int64_t>(tiles, 4), kMaxQueryTiles));
  plan.query_ranges = ceil_div(tiles, int64_t{plan.query_tiles});
  const int64_t ctas = p.batch * plan.key_tiles * plan.query_ranges;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = portable_fwd_kernel<Tr>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_blocks(kernel, ctas, kPortableThreads, sizeof(PortableFwdShared<Tr>), stream, p,
                       plan);
}

template <typename Tr>
cudaError_t launch_portable_candidates(const IndexerFwdParams& p, const CandidateRows& x,
                                       const Device& device, cudaStream_t stream) {
  static_assert(2 * (sizeof(PortableCandidateShared<Tr>) + kReservedSharedBytes) <=
                kMinSharedBytes + kReservedSharedBytes);
  // Segments of 64 tiles, or shorter ones if there would be fewer than 8 per SM.
  const int64_t tiles = x.rows * ceil_div(x.size, int64_t{kHeldRows});
  const int64_t even = tiles / (8 * device.num_sms) / kPortableWarps * kPortableWarps;
  const int segment_tiles = static_cast<int>(std::clamp<int64_t>(even, kPortableWarps, 64));
  const int64_t ctas = x.rows * ceil_div(x.size, int64_t{segment_tiles} * kHeldRows);
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = portable_candidate_kernel<Tr>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_blocks(kernel, ctas, kPortableThreads, sizeof(PortableCandidateShared<Tr>), stream,
                       p, x, segment_tiles);
}

template <typename Tr>
cudaError_t launch_portable_blocks(const BlockMaxParams& params, const Device& device,
                                   cudaStream_t stream) {
  using Shared = PortableBlockShared<PortableBlockTraits<Tr>>;
  static_assert(2 * (sizeof(Shared) + kReservedSharedBytes) <=
                kMinSharedBytes + kReservedSharedBytes);
  const int64_t work_tiles =
      params.in.batch * ceil_div(params.in.queries * params.in.heads, int64_t{kCtaRows});
  const int64_t units = work_tiles * ceil_div(params.in.keys, int64_t{params.unit_keys});
  const auto kernel = portable_block_kernel<PortableBlockTraits<Tr>>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_persistent<Shared, 2>(kernel, units, kPortableThreads, stream, params);
}

// Calls launch<ProductTraits>() for the number of channels.
template <IndexerDType kDType, typename Launch>
cudaError_t with_channels(int channels, const Launch& launch) {
  switch (channels) {
    case 32:
      return launch.template operator()<ProductTraits<kDType, 32>>();
    case 64:
      return launch.template operator()<ProductTraits<kDType, 64>>();
    case 128:
      return launch.template operator()<ProductTraits<kDType, 128>>();
  }
  return cudaErrorInvalidValue;
}

// The launchers of one dtype. They are not inline, so that only one translation unit has the
// kernels.
template <IndexerDType kDType>
struct Portable {
  static cudaError_t fwd(const IndexerFwdParams& p, const Device& device, cudaStream_t stream);
  static cudaError_t candidates(const IndexerFwdParams& p, const CandidateRows& x,
                                const Device& device, cudaStream_t stream);
  static cudaError_t blocks(const BlockMaxParams& p, const Device& device, cudaStream_t stream);
};

template <IndexerDType kDType>
cudaError_t Portable<kDType>::fwd(const IndexerFwdParams& p, const Device& device,
                                  cudaStream_t stream) {
  return with_channels<kDType>(
      p.channels, [&]<typename Tr>() { return launch_portable_fwd<Tr>(p, device, stream); });
}

template <IndexerDType kDType>
cudaError_t Portable<kDType>::candidates(const IndexerFwdParams& p, const CandidateRows& x,
                                         const Device& device, cudaStream_t stream) {
  return with_channels<kDType>(p.channels, [&]<typename Tr>() {
    return launch_portable_candidates<Tr>(p, x, device, stream);
  });
}

template <IndexerDType kDType>
cudaError_t Portable<kDType>::blocks(const BlockMaxParams& p, const Device& device,
                                     cudaStream_t stream) {
  return with_channels<kDType>(
      p.in.channels, [&]<typename Tr>() { return launch_portable_blocks<Tr>(p, device, stream); });
}

}  // namespace jax_dsa::indexer
