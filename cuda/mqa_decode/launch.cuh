// Launches a decode kernel and the merge of its pieces.
#pragma once

#include "common/launch.cuh"
#include "mqa_decode/merge.cuh"

namespace jax_dsa::mqa_decode {

// `kernel` in kBlocks blocks a multiprocessor; kWide: see PieceLine.
template <typename Shared, int kBlocks, bool kWide>
cudaError_t launch(void (*kernel)(Decode), const MqaDecodeParams& params, int tile_rows,
                   int threads, cudaStream_t stream) {
  static_assert(shared_memory_fits(kBlocks, sizeof(Shared)));
  Device device;
  if (cudaError_t e = current_device(&device); e != cudaSuccess) return e;
  const Decode p(params, tile_rows, kBlocks * std::min(device.processors, kMostProcessors));
  const int64_t tiles = ceil_div(p.keys, int64_t{kTile}) + kItemCost + 1;
  if ((p.batch * p.groups * p.passes + kMaxTeams) * tiles > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t blocks = int64_t{p.teams} * p.members;
  const cudaError_t e = launch_blocks(kernel, blocks, threads, sizeof(Shared), stream, p);
  if (e != cudaSuccess || p.teams == 1) return e;
  const auto merge =
      kWide || p.value_dim % 256 == 0 ? merge_kernel<kWide, 2> : merge_kernel<kWide, 1>;
  return launch_behind(merge, int64_t{kMergeBlocks} * device.processors, kMergeThreads,
                       sizeof(MergeShared), stream, p, tile_rows);
}

}  // namespace jax_dsa::mqa_decode
