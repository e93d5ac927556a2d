// Chooses the top-k kernel. Short rows are held in registers. Otherwise, a few long rows are
// processed by one cluster each, and many rows by one CTA each, which has more threads if the rows
// are long.

#include <algorithm>

#include "common/error.h"
#include "common/launch.cuh"
#include "topk/fwd.cuh"
#include "topk/resident.cuh"

namespace jax_dsa {
namespace {

constexpr int kMaxRanks = 8;  // CTAs of the largest portable cluster
// The number of logits per CTA from which another CTA in the cluster is worth its synchronisation.
constexpr int64_t kMinSplit = int64_t{1} << 15;
// The row size from which a wide CTA is faster for any number of rows.
constexpr int64_t kLongRow = int64_t{1} << 16;

// Returns the number of entries of a list for `wanted` values. Beside these it has room for as many
// again, and for at least one tile.
int capacity_for(int64_t wanted, int64_t tile) {
  return static_cast<int>(ceil_div(wanted + std::max(wanted, tile), int64_t{4}) * 4);
}

}  // namespace

cudaError_t launch_topk(const TopkParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.k == 0) return cudaSuccess;
  const int64_t wanted = std::min(p.k, p.size);
  if (wanted > kTopkMaxSelected || p.size > kTopkMaxSize) return cudaErrorInvalidValue;
  if (p.rows > INT32_MAX / kMaxRanks) return cudaErrorInvalidValue;
  if (topk::fits<topk::Resident>(p)) return topk::launch_resident<topk::Resident>(p, stream);
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));

  const int64_t resident = int64_t{device.num_sms} * topk::Wide::kCtasPerSm;
  int ranks = 1;
  while (ranks < kMaxRanks && p.rows * ranks * 2 <= resident && p.size >= 2 * ranks * kMinSplit) {
    ranks *= 2;
  }
  if (ranks > 1) {
    return topk::launch<topk::Latency>(p, capacity_for(wanted, topk::Latency::kTile), ranks,
                                       stream);
  }
  if (p.rows <= resident || p.size >= kLongRow) {
    return topk::launch<topk::Wide>(p, capacity_for(wanted, topk::Wide::kTile), 1, stream);
  }
  return topk::launch<topk::Throughput>(p, capacity_for(wanted, topk::Throughput::kTile), 1,
                                        stream);
}

}  // namespace jax_dsa
