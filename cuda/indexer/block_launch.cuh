// Launches the block-maximum kernel. Each dtype is a translation unit of its own.
#pragma once

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "indexer/block_max.cuh"

namespace jax_dsa::indexer {

template <typename Tr>
cudaError_t launch_block_variant(BlockMaxParams params, cudaStream_t stream) {
  const IndexerFwdParams& p = params.in;
  constexpr auto kType = Tr::kDType == IndexerDType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int64_t rows = p.queries * p.heads;
  const bool paged = p.page_table != nullptr;
  const int64_t keys = paged ? int64_t{p.pages} * p.page_size : p.keys;
  CUtensorMap q, k;
  DSA_RETURN_IF_CUDA_ERROR(
      encode_tensor_map(&q, kType,
                        tensor_box<3>(Tr::kElementBytes, p.q, {p.channels, rows, p.batch},
                                      {Tr::kRowElements, 64, 1})));
  DSA_RETURN_IF_CUDA_ERROR(encode_tensor_map(
      &k, kType,
      tensor_box<3>(Tr::kElementBytes, p.k, {p.channels, keys, paged ? p.pools : p.batch},
                    {Tr::kRowElements, kTile, 1})));
  const int64_t work_tiles = p.batch * ceil_div(rows, int64_t{Tr::kRows});
  const int64_t units = ceil_div(p.keys, int64_t{params.unit_keys});
  return launch_persistent<BlockShared<Tr>>(block_max_kernel<Tr>, work_tiles * units, Tr::kThreads,
                                            stream, params, q, k);
}

template <IndexerDType kDType, int kChannels>
cudaError_t launch_blocks_of(const BlockMaxParams& p, bool pairs, cudaStream_t stream) {
  return pairs ? launch_block_variant<BlockTraits<kDType, kChannels, 2>>(p, stream)
               : launch_block_variant<BlockTraits<kDType, kChannels, 1>>(p, stream);
}

// `pairs` says that a unit is a pair of blocks of 64 keys; otherwise it is one block.
template <IndexerDType kDType>
cudaError_t launch_block_channels(const BlockMaxParams& p, bool pairs, cudaStream_t stream) {
  switch (p.in.channels) {
    case 32:
      return launch_blocks_of<kDType, 32>(p, pairs, stream);
    case 64:
      return launch_blocks_of<kDType, 64>(p, pairs, stream);
    case 128:
      return launch_blocks_of<kDType, 128>(p, pairs, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa::indexer
