// Launches the indexer's backward kernels.

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "indexer/bwd_keys.cuh"
#include "indexer/bwd_queries.cuh"
#include "indexer/bwd_scale.cuh"
#include "indexer/indexer.h"

namespace jax_dsa {
namespace {

template <int kC, int kPartition>
cudaError_t launch(const IndexerBwdParams& p, cudaStream_t stream) {
  using namespace indexer_bwd;
  const int64_t tokens = p.batch * p.queries;
  if (cudaError_t e = launch_persistent<QueryShared<kC>>(queries_kernel<kC>, (tokens + 1) / 2,
                                                         kQueryThreads, stream, p);
      e != cudaSuccess || p.slots == 0 || p.keys == 0) {
    return e;
  }
  // If there are too few query tiles to occupy all SMs, their KV partitions are divided among
  // several CTAs.
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const int64_t partitions = ceil_div(p.keys, int64_t{kPartition});
  const auto splits = static_cast<int>(
      std::min(partitions, ceil_div(int64_t{2} * device.num_sms, key_work_tile_count(p, 1))));
  const int64_t work_tiles = key_work_tile_count(p, splits);
  if (work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  return launch_persistent<KeyShared<kC, kPartition>>(keys_kernel<kC, kPartition>, work_tiles,
                                                      kKeyThreads, stream, p, splits);
}

// kPartition is the number of keys per KV partition.
template <int kPartition>
cudaError_t launch_partitions(const IndexerBwdParams& p, cudaStream_t stream) {
  if (!is_valid(p)) return cudaErrorInvalidValue;
  const int64_t rows = p.batch * p.keys;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.dk, rows * p.channels * sizeof(float), stream));
  if (p.batch > 0 && p.queries > 0) {
    const cudaError_t e =
        p.channels == 128 ? launch<128, kPartition>(p, stream) : launch<64, kPartition>(p, stream);
    if (e != cudaSuccess) return e;
  }
  if (rows == 0 || p.k_scale == nullptr) return cudaSuccess;
  return launch_blocks(indexer_bwd::scale_kernel, ceil_div(rows, int64_t{8}), 256, 0, stream, p);
}

}  // namespace

cudaError_t hopper::launch_indexer_bwd(const IndexerBwdParams& p, cudaStream_t stream) {
  return launch_partitions<indexer_bwd::kKeyPartition>(p, stream);
}

}  // namespace jax_dsa
