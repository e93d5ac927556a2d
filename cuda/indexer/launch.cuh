// Launches the forward kernels.
#pragma once

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "indexer/decode.cuh"
#include "indexer/fwd.cuh"

namespace jax_dsa::indexer {

template <typename Tr, typename Memory>
cudaError_t launch_kernel(void (*kernel)(IndexerFwdParams, CUtensorMap, CUtensorMap),
                          const IndexerFwdParams& p, cudaStream_t stream) {
  constexpr int kRowElements = Tr::kRowBytes / Tr::kElementBytes;
  constexpr auto kType = Tr::kDType == IndexerDType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  CUtensorMap q, k;
  DSA_RETURN_IF_CUDA_ERROR(encode_tensor_map(
      &q, kType,
      tensor_box<4>(Tr::kElementBytes, p.q, {p.channels, p.heads, p.queries, p.batch},
                    {kRowElements, Tr::kHeads, Tr::kOwnQueries, 1})));
  const bool paged = p.page_table != nullptr;
  const int64_t keys = paged ? int64_t{p.pages} * p.page_size : p.keys;
  DSA_RETURN_IF_CUDA_ERROR(encode_tensor_map(
      &k, kType,
      tensor_box<3>(Tr::kElementBytes, p.k, {p.channels, keys, paged ? p.pools : p.batch},
                    {kRowElements, kTile, 1})));
  const int64_t work_tiles = p.batch * ceil_div(p.queries, int64_t{Tr::kQueries});
  const int64_t tiles = work_tiles * ceil_div(p.keys, int64_t{kTile});
  return launch_persistent<Memory>(kernel, tiles, Tr::kThreads, stream, p, q, k);
}

template <typename Tr>
cudaError_t launch_fwd(const IndexerFwdParams& p, cudaStream_t stream) {
  return launch_kernel<Tr, Shared<Tr>>(fwd_kernel<Tr>, p, stream);
}

template <typename Tr>
cudaError_t launch_decode(const IndexerFwdParams& p, cudaStream_t stream) {
  return launch_kernel<Tr, DecodeShared<Tr>>(decode_kernel<Tr>, p, stream);
}

template <IndexerDType kDType, int kChannels, bool kPaged>
cudaError_t launch_heads(const IndexerFwdParams& p, cudaStream_t stream) {
  if (p.heads <= 16) return launch_fwd<Traits<kDType, kChannels, 16, kPaged>>(p, stream);
  if (p.heads <= 32) return launch_fwd<Traits<kDType, kChannels, 32, kPaged>>(p, stream);
  return launch_fwd<Traits<kDType, kChannels, 64, kPaged>>(p, stream);
}

template <IndexerDType kDType, int kChannels>
cudaError_t launch_layout(const IndexerFwdParams& p, cudaStream_t stream) {
  return p.page_table ? launch_heads<kDType, kChannels, true>(p, stream)
                      : launch_heads<kDType, kChannels, false>(p, stream);
}

// Launches the decode kernel with the fewest columns that hold the queries.
template <IndexerDType kDType, int kChannels>
cudaError_t launch_few_queries(const IndexerFwdParams& p, cudaStream_t stream) {
  if (p.heads <= 16) return launch_decode<DecodeTraits<kDType, kChannels, 16, 4>>(p, stream);
  if (p.heads <= 32) {
    return p.queries <= 2 ? launch_decode<DecodeTraits<kDType, kChannels, 32, 2>>(p, stream)
                          : launch_decode<DecodeTraits<kDType, kChannels, 32, 4>>(p, stream);
  }
  return p.queries == 1 ? launch_decode<DecodeTraits<kDType, kChannels, 64, 1>>(p, stream)
                        : launch_decode<DecodeTraits<kDType, kChannels, 64, 4>>(p, stream);
}

template <IndexerDType kDType, int kChannels>
cudaError_t launch_queries(const IndexerFwdParams& p, bool few, cudaStream_t stream) {
  return few ? launch_few_queries<kDType, kChannels>(p, stream)
             : launch_layout<kDType, kChannels>(p, stream);
}

template <IndexerDType kDType>
cudaError_t launch_channels(const IndexerFwdParams& p, bool few, cudaStream_t stream) {
  switch (p.channels) {
    case 32:
      return launch_queries<kDType, 32>(p, few, stream);
    case 64:
      return launch_queries<kDType, 64>(p, few, stream);
    case 128:
      return launch_queries<kDType, 128>(p, few, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa::indexer
