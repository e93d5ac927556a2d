// Launches a decode kernel and the merge of its pieces.
#pragma once

#include "common/launch.cuh"
#include "mqa_decode/merge.cuh"

namespace jax_dsa::mqa_decode {

// `kernel` in kBlocks blocks a SM; kWide: see PieceLine.
template <typename Shared, int kBlocks, bool kWide>
cudaError_t launch(void (*kernel)(Decode), const MqaDecodeParams& params, int tile_rows,
                   int threads, cudaStream_t stream) {
  static_assert(shared_memory_fits(kBlocks, sizeof(Shared)));
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const Decode p(params, tile_rows, kBlocks * std::min(device.num_sms, kMaxSms));
  const int64_t tiles = ceil_div(p.keys, int64_t{kTile}) + kItemCost + 1;
  if ((p.batch * p.groups * p.passes + kMaxTeams) * tiles > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t blocks = int64_t{p.teams} * p.members;
  const cudaError_t e = launch_blocks(kernel, blocks, threads, sizeof(Shared), stream, p);
  if (e != cudaSuccess || p.teams == 1) return e;
  const auto merge =
      kWide || p.value_dim % 256 == 0 ? merge_kernel<kWide, 2> : merge_kernel<kWide, 1>;
  return launch_pdl(merge, int64_t{kMergeBlocks} * device.num_sms, kMergeThreads,
                    sizeof(MergeShared), stream, p, tile_rows);
}

}  // namespace jax_dsa::mqa_decode
