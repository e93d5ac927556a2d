// Launcher of the indexer's backward kernels.

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "indexer/bwd_keys.cuh"
#include "indexer/bwd_queries.cuh"
#include "indexer/indexer.h"

namespace jax_dsa {
namespace {

template <int kC, int kWindow>
cudaError_t launch(const IndexerBwdParams& p, cudaStream_t stream) {
  using namespace indexer_bwd;
  const int64_t tokens = p.batch * p.queries;
  if (cudaError_t e = launch_persistent<QueryShared<kC>>(queries_kernel<kC>, (tokens + 1) / 2,
                                                         kQueryThreads, stream, p);
      e != cudaSuccess || p.slots == 0 || p.keys == 0) {
    return e;
  }
  // Few groups of queries are cut by windows of keys, so that every processor gets some.
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const int64_t windows = ceil_div(p.keys, int64_t{kWindow});
  const auto parts = static_cast<int>(
      std::min(windows, ceil_div(int64_t{2} * device.num_sms, key_item_count(p, 1))));
  const int64_t items = key_item_count(p, parts);
  if (items > INT32_MAX - 4096) return cudaErrorInvalidValue;
  return launch_persistent<KeyShared<kC, kWindow>>(keys_kernel<kC, kWindow>, items, kKeyThreads,
                                                   stream, p, parts);
}

// kWindow: keys of a window.
template <int kWindow>
cudaError_t launch_windows(const IndexerBwdParams& p, cudaStream_t stream) {
  if (p.keys > INT32_MAX - 4096 || p.heads < 1 || p.heads > kIndexerMaxHeads || p.slots < 0 ||
      p.slots > kIndexerBwdMaxSlots || (p.k_scale == nullptr) != (p.dk_scale == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (p.channels != 32 && p.channels != 64 && p.channels != 128) return cudaErrorInvalidValue;
  const int64_t rows = p.batch * p.keys;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.dk, rows * p.channels * sizeof(float), stream));
  if (p.batch > 0 && p.queries > 0) {
    const cudaError_t e =
        p.channels == 128 ? launch<128, kWindow>(p, stream) : launch<64, kWindow>(p, stream);
    if (e != cudaSuccess) return e;
  }
  if (rows == 0 || p.k_scale == nullptr) return cudaSuccess;
  return launch_blocks(indexer_bwd::scale_kernel, ceil_div(rows, int64_t{8}), 256, 0, stream, p);
}

}  // namespace

cudaError_t launch_indexer_bwd(const IndexerBwdParams& p, cudaStream_t stream) {
  return launch_windows<indexer_bwd::kKeyWindow>(p, stream);
}

}  // namespace jax_dsa
