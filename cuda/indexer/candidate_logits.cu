// Launches the Hopper kernel for the logits of candidate keys.

#include <algorithm>

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "indexer/candidates.cuh"

namespace jax_dsa {
namespace {

using namespace indexer;

template <IndexerDType kDType, int kChannels>
cudaError_t launch_logits(const IndexerFwdParams& p, const CandidateRows& x, cudaStream_t stream) {
  using Tr = DecodeTraits<kDType, kChannels, kIndexerMaxHeads, 1>;
  constexpr auto kType = kDType == IndexerDType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  CUtensorMap q;
  DSA_RETURN_IF_CUDA_ERROR(encode_tensor_map(
      &q, kType,
      tensor_box<4>(Tr::kElementBytes, p.q, {p.channels, p.heads, p.queries, p.batch},
                    {Tr::kRowBytes / Tr::kElementBytes, Tr::kColumns, 1, 1})));
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  // Segments of 64 tiles, or shorter ones if there would be fewer than 8 per SM.
  const int64_t tiles = x.rows * ceil_div(x.size, int64_t{kTile});
  const int64_t even = tiles / (8 * device.num_sms) / Tr::kWarpgroups * Tr::kWarpgroups;
  const int segment_tiles = static_cast<int>(std::clamp<int64_t>(even, Tr::kWarpgroups, 64));
  const int64_t units = x.rows * ceil_div(x.size, int64_t{segment_tiles} * kTile);
  return launch_persistent<CandidateShared<Tr>>(candidate_kernel<Tr>, units, Tr::kThreads, stream,
                                                p, x, segment_tiles, q);
}

template <IndexerDType kDType>
cudaError_t launch_channels(const IndexerFwdParams& p, const CandidateRows& x,
                            cudaStream_t stream) {
  switch (p.channels) {
    case 32:
      return launch_logits<kDType, 32>(p, x, stream);
    case 64:
      return launch_logits<kDType, 64>(p, x, stream);
    case 128:
      return launch_logits<kDType, 128>(p, x, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t hopper::launch_candidate_logits(const IndexerFwdParams& p, const CandidateRows& x,
                                            cudaStream_t stream) {
  return p.dtype == IndexerDType::kBF16 ? launch_channels<IndexerDType::kBF16>(p, x, stream)
                                        : launch_channels<IndexerDType::kE4M3>(p, x, stream);
}

}  // namespace jax_dsa
